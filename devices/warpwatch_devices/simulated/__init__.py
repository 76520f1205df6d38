"""Devices without hardware: profiles of real GPUs and their physics, for the demo and for tests."""
