/* Temperatures, their limits, and fans. */
#include "fakenvml.h"

int temperature_c(const call_t *call)
{
    double load = load_percent(call->row, monotonic_s());
    return (int)setting(call->row, SET_temperature_c, 30 + call->gpu + load / 5);
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor,
                                      unsigned int *celsius)
{
    ENTER(device, nvmlDeviceGetTemperature);
    NEEDS(celsius && sensor == NVML_TEMPERATURE_GPU);
    WHOLE_GPU;
    *celsius = (unsigned)temperature_c(&call);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature)
{
    ENTER(device, nvmlDeviceGetTemperatureV);
    NEEDS(temperature);
    VERSION(temperature, nvmlTemperature_v1);
    NEEDS(temperature->sensorType == NVML_TEMPERATURE_GPU);
    WHOLE_GPU;
    temperature->temperature = temperature_c(&call);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device,
                                               nvmlTemperatureThresholds_t threshold,
                                               unsigned int *celsius)
{
    ENTER(device, nvmlDeviceGetTemperatureThreshold);
    NEEDS(celsius && threshold < NVML_TEMPERATURE_THRESHOLD_COUNT);
    WHOLE_GPU;
    const unsigned known[NVML_TEMPERATURE_THRESHOLD_COUNT] = {
        call.profile->shutdown_c, call.profile->slowdown_c, call.profile->memory_max_c,
        call.profile->gpu_max_c};
    SUPPORTED(known[threshold] != 0);
    *celsius = known[threshold];
    return NVML_SUCCESS;
}

/* How far it is to the temperature from which the GPU is slowed down. */
nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, nvmlMarginTemperature_t *margin)
{
    ENTER(device, nvmlDeviceGetMarginTemperature);
    NEEDS(margin);
    VERSION(margin, nvmlMarginTemperature_v1);
    WHOLE_GPU;
    SUPPORTED(call.profile->t_limit);
    margin->marginTemperature = 85 - temperature_c(&call);
    return NVML_SUCCESS;
}

/* fans */

static unsigned fan_percent(const call_t *call)
{
    return (unsigned)setting(call->row, SET_fan_percent, under_load(call) ? 45 : 30);
}

nvmlReturn_t nvmlDeviceGetNumFans(nvmlDevice_t device, unsigned int *fans)
{
    ENTER(device, nvmlDeviceGetNumFans);
    NEEDS(fans);
    WHOLE_GPU;
    *fans = call.profile->fans;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned int *speed)
{
    ENTER(device, nvmlDeviceGetFanSpeed);
    NEEDS(speed);
    WHOLE_GPU;
    SUPPORTED(call.profile->fans);
    *speed = fan_percent(&call);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetFanSpeed_v2(nvmlDevice_t device, unsigned int fan, unsigned int *speed)
{
    ENTER(device, nvmlDeviceGetFanSpeed_v2);
    NEEDS(speed);
    WHOLE_GPU;
    SUPPORTED(call.profile->fans);
    NEEDS(fan < call.profile->fans);
    *speed = fan_percent(&call) + fan;
    return NVML_SUCCESS;
}
