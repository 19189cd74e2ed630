"""Freeze finished rollouts from Kafka into training-ready trajectories."""
