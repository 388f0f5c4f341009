"""One job -> MLflow runs: the only place that knows MLflow."""
