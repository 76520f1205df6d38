"""The names of dcgm_structs that are used, with DCGM's values: a stand-in, not DCGM's own code."""

from tests.devices.dcgm_stand_in.host_engine import DCGMError

__all__ = ["DCGMError"]

DCGM_OPERATION_MODE_AUTO = 1

DCGM_ST_NOT_SUPPORTED = -6
DCGM_ST_NO_DATA = -14
DCGM_ST_NO_PERMISSION = -17
DCGM_ST_GPU_IS_LOST = -18
DCGM_ST_CONNECTION_NOT_VALID = -21
DCGM_ST_DUPLICATE_KEY = -26
DCGM_ST_MODULE_NOT_LOADED = -33
DCGM_ST_PROFILING_NOT_SUPPORTED = -36
