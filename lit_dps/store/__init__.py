"""The databases of a study: the truth in an Optuna storage, the view in MLflow. None else imports their libraries."""
