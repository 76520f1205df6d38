"""The names of pydcgm that are used, on the stand-in of host_engine.py: not DCGM's own code."""

from tests.devices.dcgm_stand_in.host_engine import DcgmFieldGroup, DcgmGroup, DcgmHandle

__all__ = ["DcgmFieldGroup", "DcgmGroup", "DcgmHandle"]
