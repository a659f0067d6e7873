"""Remembers: the journal is the truth, MLflow is the view."""
