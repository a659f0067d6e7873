"""What can be tried: shapes, knobs, candidates, rules. Pure Python; imports no torch, ray, optuna or mlflow."""
