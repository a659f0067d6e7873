"""A process with threads must not be forked for trials. (That preloading leaves one thread, every gang test checks.)"""

import threading

import pytest

from train_worker.megatron.preload import preload, thread_count


def test_a_process_with_threads_is_refused_before_anything_is_imported() -> None:
    done = threading.Event()
    before = thread_count()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert thread_count() == before + 1
        with pytest.raises(RuntimeError, match="threads before importing, not 1"):
            preload("cpu")
    finally:
        done.set()
        thread.join()
