"""Runs one candidate and says what happened. megatron is imported only under `train_worker.megatron`."""
