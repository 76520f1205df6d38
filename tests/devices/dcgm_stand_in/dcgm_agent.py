"""The names of dcgm_agent that are used, on the stand-in of host_engine.py: not DCGM's own code."""

from tests.devices.dcgm_stand_in.host_engine import dcgmGetGpuInstanceHierarchy

__all__ = ["dcgmGetGpuInstanceHierarchy"]
