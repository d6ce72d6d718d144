"""What a run is: one YAML file, checked whole before anything starts. One file a section that has much to say."""
