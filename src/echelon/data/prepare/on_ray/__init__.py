"""The same recipe on the machines of a Ray cluster. Ray is imported on use."""
