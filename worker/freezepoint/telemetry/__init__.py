"""What a running worker tells: log lines."""
