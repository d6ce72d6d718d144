"""The run configuration: one YAML file, checked whole before anything starts."""
