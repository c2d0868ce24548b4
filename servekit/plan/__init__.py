"""Capacity plans: how many replicas a load needs, from step times and Little's law."""
