/* nvmlDeviceGetFieldValues: many values in one call, each with its own return code. */
#include "fakenvml.h"
#include "newer.h"

typedef nvmlReturn_t (*read_t)(const call_t *call, const motion_t *motion, nvmlFieldValue_t *value);

static nvmlReturn_t give(nvmlFieldValue_t *value, double number)
{
    value->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    value->value.ullVal = (unsigned long long)number;
    return NVML_SUCCESS;
}

static nvmlReturn_t give_small(nvmlFieldValue_t *value, double number)
{
    value->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
    value->value.ullVal = 0;
    value->value.uiVal = (unsigned)number;
    return NVML_SUCCESS;
}

static nvmlReturn_t give_signed(nvmlFieldValue_t *value, int number)
{
    value->valueType = NVML_VALUE_TYPE_SIGNED_INT;
    value->value.ullVal = 0;
    value->value.siVal = number;
    return NVML_SUCCESS;
}

static double of(const call_t *call, setting_t name) { return call->row->settings[name]; }

static nvmlReturn_t read_ecc(const call_t *call, const motion_t *motion, nvmlFieldValue_t *value)
{
    static const setting_t totals[] = {SET_ecc_corrected, SET_ecc_uncorrected,
                                       SET_ecc_corrected_aggregate, SET_ecc_uncorrected_aggregate};
    unsigned field = value->fieldId;
    (void)motion;
    SUPPORTED(call->profile->ecc);
    if (field == NVML_FI_DEV_ECC_CURRENT)
        return give_small(value, ecc_is_on(call));
    if (field == NVML_FI_DEV_ECC_PENDING)
        return give_small(value, setting(call->row, SET_ecc_pending, ecc_is_on(call)));
    SUPPORTED(ecc_is_on(call));
    if (field <= NVML_FI_DEV_ECC_DBE_AGG_TOTAL) {
        unsigned which = field - NVML_FI_DEV_ECC_SBE_VOL_TOTAL;
        return give(value,
                    of(call, totals[which]) + (which % 2 ? of(call, SET_sram_uncorrected) : 0));
    }
    switch (field) {
    case NVML_FI_DEV_ECC_SBE_VOL_DEV: return give(value, of(call, SET_ecc_corrected));
    case NVML_FI_DEV_ECC_DBE_VOL_DEV: return give(value, of(call, SET_ecc_uncorrected));
    case NVML_FI_DEV_ECC_SBE_AGG_DEV: return give(value, of(call, SET_ecc_corrected_aggregate));
    case NVML_FI_DEV_ECC_DBE_AGG_DEV: return give(value, of(call, SET_ecc_uncorrected_aggregate));
    default: return give(value, 0);
    }
}

static nvmlReturn_t read_retired(const call_t *call, const motion_t *motion,
                                 nvmlFieldValue_t *value)
{
    (void)motion;
    SUPPORTED(call->profile->retired_pages);
    switch (value->fieldId) {
    case NVML_FI_DEV_RETIRED_SBE: return give(value, of(call, SET_retired_single_bit));
    case NVML_FI_DEV_RETIRED_DBE: return give(value, of(call, SET_retired_double_bit));
    default: return give(value, of(call, SET_retired_pending));
    }
}

static nvmlReturn_t read_remapped(const call_t *call, const motion_t *motion,
                                  nvmlFieldValue_t *value)
{
    (void)motion;
    SUPPORTED(call->profile->row_banks && call->row->mig_count == 0);
    switch (value->fieldId) {
    case NVML_FI_DEV_REMAPPED_COR: return give_small(value, of(call, SET_remapped_correctable));
    case NVML_FI_DEV_REMAPPED_UNC: return give_small(value, of(call, SET_remapped_uncorrectable));
    case NVML_FI_DEV_REMAPPED_PENDING: return give_small(value, of(call, SET_remap_pending));
    default: return give_small(value, of(call, SET_remap_failure));
    }
}

static nvmlReturn_t read_policy(const call_t *call, const motion_t *motion, nvmlFieldValue_t *value)
{
    unsigned field = value->fieldId;
    bool is_power = field == NVML_FI_DEV_PERF_POLICY_POWER;
    SUPPORTED(is_power || call->profile->event_counters);
    unsigned bit = is_power                                      ? 2
                   : field == NVML_FI_DEV_PERF_POLICY_THERMAL    ? 6
                   : field == NVML_FI_DEV_PERF_POLICY_SYNC_BOOST ? 4
                                                                 : 15;
    return give(value, motion->reason_s[bit] * 1e9);
}

static nvmlReturn_t read_reason(const call_t *call, const motion_t *motion, nvmlFieldValue_t *value)
{
    static const unsigned bits[] = {5, 6, 7};
    bool is_old = value->fieldId < SW_THERMAL_FIELD;
    bool driver_is_old = of(call, SET_old_fields) == 1;
    unsigned first = is_old ? OLD_SW_THERMAL_FIELD : SW_THERMAL_FIELD;
    SUPPORTED(call->profile->event_counters && is_old == driver_is_old);
    return give(value, motion->reason_s[bits[value->fieldId - first]] * 1e9);
}

static nvmlReturn_t read_power(const call_t *call, const motion_t *motion, nvmlFieldValue_t *value)
{
    const profile_t *profile = call->profile;
    double mw = 1000 * power_w(call->row, motion->at_s);
    SUPPORTED(value->scopeId == NVML_POWER_SCOPE_GPU);
    switch (value->fieldId) {
    case NVML_FI_DEV_POWER_AVERAGE: SUPPORTED(profile->power_average); return give_small(value, mw);
    case NVML_FI_DEV_POWER_INSTANT: SUPPORTED(profile->power_instant); return give_small(value, mw);
    case NVML_FI_DEV_POWER_MIN_LIMIT: return give_small(value, 1000.0 * profile->min_limit_w);
    case NVML_FI_DEV_POWER_MAX_LIMIT: return give_small(value, 1000.0 * profile->max_limit_w);
    case NVML_FI_DEV_POWER_DEFAULT_LIMIT: return give_small(value, 1000.0 * profile->limit_w);
    case NVML_FI_DEV_POWER_CURRENT_LIMIT:
        return give_small(value,
                          1000 * setting(call->row, SET_enforced_limit_w, limit_mw(call) / 1e3));
    case NVML_FI_DEV_ENERGY: return give(value, motion->energy_j * 1000);
    default: return give_small(value, limit_mw(call));
    }
}

static nvmlReturn_t read_energy(const call_t *call, const motion_t *motion, nvmlFieldValue_t *value)
{
    (void)call;
    return give(value, motion->energy_j * 1000);
}

static nvmlReturn_t read_memory_temperature(const call_t *call, const motion_t *motion,
                                            nvmlFieldValue_t *value)
{
    (void)motion;
    SUPPORTED(call->profile->memory_temperature);
    return give_small(value, setting(call->row, SET_memory_temperature_c, temperature_c(call) + 8));
}

static nvmlReturn_t read_t_limit(const call_t *call, const motion_t *motion,
                                 nvmlFieldValue_t *value)
{
    const profile_t *profile = call->profile;
    const int limits[] = {profile->shutdown_tlimit, profile->slowdown_tlimit,
                          profile->memory_max_tlimit, profile->gpu_max_tlimit};
    (void)motion;
    SUPPORTED(profile->t_limit);
    return give_signed(value, limits[value->fieldId - NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT]);
}

static nvmlReturn_t read_pcie(const call_t *call, const motion_t *motion, nvmlFieldValue_t *value)
{
    (void)motion;
    if (value->fieldId == NVML_FI_DEV_PCIE_REPLAY_COUNTER)
        return give_small(value, of(call, SET_pcie_replays));
    if (value->fieldId == NVML_FI_DEV_PCIE_REPLAY_ROLLOVER_COUNTER)
        return give_small(value, 0);
    SUPPORTED(call->profile->pcie_counters);
    return give_small(value, of(call, SET_pcie_errors));
}

static nvmlReturn_t read_pcie_bytes(const call_t *call, const motion_t *motion,
                                    nvmlFieldValue_t *value)
{
    SUPPORTED(call->profile->pcie_counters);
    return give(value, fmod(floor(pcie_bytes(motion)), exp2(of(call, SET_pcie_counter_bits))));
}

static nvmlReturn_t read_nvlink_data(const call_t *call, const motion_t *motion,
                                     nvmlFieldValue_t *value)
{
    unsigned links = call->profile->nvlinks, link = value->scopeId;
    SUPPORTED(links);
    double total = nvlink_kib(motion);
    if (value->fieldId >= NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_TX)
        total *= 1.1; /* with the protocol's overhead */
    REFUSE_IF(link != ~0U && link >= links, NVML_ERROR_INVALID_ARGUMENT);
    return give(value, link == ~0U ? total : link_active(call, link) ? total / links : 0);
}

/* What a link is, by scope; the totals ignore it. */
static nvmlReturn_t read_nvlink(const call_t *call, const motion_t *motion, nvmlFieldValue_t *value)
{
    const profile_t *profile = call->profile;
    unsigned link = value->scopeId;
    (void)motion;
    SUPPORTED(profile->nvlinks);
    if (value->fieldId == NVML_FI_DEV_NVLINK_LINK_COUNT)
        return give_small(value, profile->nvlinks);
    if (value->fieldId == NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT)
        return give_small(value, profile->nvswitch ? profile->nvlinks : 0);
    if (value->fieldId == NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON)
        return give_small(value, profile->nvlink_mbps);
    REFUSE_IF(link >= profile->nvlinks, NVML_ERROR_INVALID_ARGUMENT);
    switch (value->fieldId) {
    case NVML_FI_DEV_NVLINK_GET_SPEED:
        return give_small(value, link_active(call, link) ? profile->nvlink_mbps : 0);
    case NVML_FI_DEV_NVLINK_GET_STATE: return give_small(value, link_active(call, link));
    case NVML_FI_DEV_NVLINK_GET_VERSION: return give_small(value, profile->nvlink_version);
    case NVML_FI_DEV_NVLINK_GET_POWER_STATE: return give_small(value, 0);
    default: return give_small(value, link);
    }
}

static unsigned active_links(const call_t *call)
{
    unsigned active = 0;
    for (unsigned link = 0; link < call->profile->nvlinks; link++)
        active += link_active(call, link);
    return active;
}

/* The link errors that Blackwell does not count any more: totals of all links, or by scope. */
static nvmlReturn_t read_nvlink_errors(const call_t *call, const motion_t *motion,
                                       nvmlFieldValue_t *value)
{
    double each = of(call, SET_nvlink_errors);
    (void)motion;
    SUPPORTED(call->profile->nvlink_dl_errors);
    if (value->fieldId < NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY || value->scopeId == ~0U)
        return give(value, each * active_links(call));
    REFUSE_IF(value->scopeId >= call->profile->nvlinks, NVML_ERROR_INVALID_ARGUMENT);
    return give(value, link_active(call, value->scopeId) ? each : 0);
}

/* The counters that it has instead, by scope. */
static nvmlReturn_t read_nvlink_counts(const call_t *call, const motion_t *motion,
                                       nvmlFieldValue_t *value)
{
    unsigned links = call->profile->nvlinks, field = value->fieldId;
    SUPPORTED(call->profile->nvlink_counts);
    REFUSE_IF(value->scopeId >= links, NVML_ERROR_INVALID_ARGUMENT);
    REFUSE_IF((unsigned)of(call, SET_nvlinks_silent) >> value->scopeId & 1,
              (nvmlReturn_t)of(call, SET_nvlink_silence));
    double bytes = link_active(call, value->scopeId) ? nvlink_kib(motion) * 1024 / links : 0;
    switch (field) {
    case NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES:
    case NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES: return give(value, bytes);
    case NVML_FI_DEV_NVLINK_COUNT_XMIT_PACKETS:
    case NVML_FI_DEV_NVLINK_COUNT_RCV_PACKETS: return give(value, bytes / 144);
    case NVML_FI_DEV_NVLINK_COUNT_VL15_DROPPED:
    case NVML_FI_DEV_NVLINK_COUNT_RAW_BER_LANE0:
    case NVML_FI_DEV_NVLINK_COUNT_RAW_BER_LANE1:
    case NVML_FI_DEV_NVLINK_COUNT_RAW_BER: return NVML_ERROR_NOT_SUPPORTED;
    case NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER:
    case NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER: return give(value, 15 << 8 | 255); /* 15e-255 */
    default:
        return give(value, link_active(call, value->scopeId) ? of(call, SET_nvlink_errors) : 0);
    }
}

static nvmlReturn_t read_recovery(const call_t *call, const motion_t *motion,
                                  nvmlFieldValue_t *value)
{
    (void)motion;
    SUPPORTED(call->profile->recovery_action);
    return give_small(value, of(call, SET_recovery_action));
}

static const struct {
    unsigned first, last;
    read_t read;
} readers[] = {
    {NVML_FI_DEV_ECC_CURRENT, NVML_FI_DEV_ECC_DBE_AGG_CBU, read_ecc},
    {NVML_FI_DEV_RETIRED_SBE, NVML_FI_DEV_RETIRED_PENDING, read_retired},
    {NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
     read_nvlink_errors},
    {NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL, NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
     read_nvlink_errors},
    {NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
     read_nvlink_errors},
    {NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
     read_nvlink_errors},
    {NVML_FI_DEV_PERF_POLICY_POWER, NVML_FI_DEV_PERF_POLICY_TOTAL_BASE_CLOCKS, read_policy},
    {NVML_FI_DEV_MEMORY_TEMP, NVML_FI_DEV_MEMORY_TEMP, read_memory_temperature},
    {NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, read_energy},
    {NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, NVML_FI_DEV_NVLINK_LINK_COUNT, read_nvlink},
    {NVML_FI_DEV_RETIRED_PENDING_SBE, NVML_FI_DEV_RETIRED_PENDING_DBE, read_retired},
    {NVML_FI_DEV_PCIE_REPLAY_COUNTER, NVML_FI_DEV_PCIE_REPLAY_ROLLOVER_COUNTER, read_pcie},
    {NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_RX, read_nvlink_data},
    {NVML_FI_DEV_REMAPPED_COR, NVML_FI_DEV_REMAPPED_FAILURE, read_remapped},
    {NVML_FI_DEV_NVLINK_REMOTE_NVLINK_ID, NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT, read_nvlink},
    {NVML_FI_DEV_NVLINK_ECC_DATA_ERROR_COUNT_TOTAL, NVML_FI_DEV_NVLINK_ERROR_DL_CRC,
     read_nvlink_errors},
    {NVML_FI_DEV_NVLINK_GET_SPEED, NVML_FI_DEV_NVLINK_GET_POWER_STATE, read_nvlink},
    {NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS, NVML_FI_DEV_PCIE_COUNT_LANE_ERROR, read_pcie},
    {NVML_FI_DEV_POWER_AVERAGE, NVML_FI_DEV_POWER_REQUESTED_LIMIT, read_power},
    {NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT, NVML_FI_DEV_TEMPERATURE_GPU_MAX_TLIMIT, read_t_limit},
    {NVML_FI_DEV_PCIE_COUNT_TX_BYTES, NVML_FI_DEV_PCIE_COUNT_RX_BYTES, read_pcie_bytes},
    {NVML_FI_DEV_NVLINK_COUNT_XMIT_PACKETS, NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER,
     read_nvlink_counts},
    {NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, read_recovery},
    {OLD_SW_THERMAL_FIELD, OLD_SW_THERMAL_FIELD + 2, read_reason},
    {SW_THERMAL_FIELD, POWER_BRAKE_FIELD, read_reason},
};

static read_t reader_of[MAX_FIELDS];

__attribute__((constructor)) static void index_readers(void)
{
    for (size_t i = 0; i < sizeof readers / sizeof *readers; i++)
        for (unsigned field = readers[i].first; field <= readers[i].last; field++)
            reader_of[field] = readers[i].read;
}

static nvmlReturn_t read_field(const call_t *call, const motion_t *motion, nvmlFieldValue_t *value)
{
    unsigned field = value->fieldId;
    REFUSE_IF(field == 0 || field >= MAX_FIELDS, NVML_ERROR_INVALID_ARGUMENT);
    REFUSE_IF(call->row->field_error[field], call->row->field_error[field]);
    if (call->row->field_is_set[field]) {
        value->valueType = call->row->field_type[field];
        value->value = call->row->field_value[field];
        return NVML_SUCCESS;
    }
    SUPPORTED(reader_of[field]);
    nvmlReturn_t code = reader_of[field](call, motion, value);
    if (code == NVML_SUCCESS && call->row->settings[SET_sentinels] != 0)
        value->value.ullVal = ~0ULL;
    return code;
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    ENTER(device, nvmlDeviceGetFieldValues);
    NEEDS(values && count > 0);
    WHOLE_GPU;
    for (int i = 0; i < count; i++)
        if (values[i].fieldId < MAX_FIELDS && call.row->field_fails_call[values[i].fieldId])
            return call.row->field_fails_call[values[i].fieldId];
    motion_t motion = move(call.gpu, call.row);
    for (int i = 0; i < count; i++) {
        /* A negative code: the driver leaves this one as it is. */
        if (values[i].fieldId < MAX_FIELDS && call.row->field_error[values[i].fieldId] < 0)
            continue;
        values[i].timestamp = (long long)wall_us(motion.at_s);
        values[i].latencyUsec = 2;
        values[i].nvmlReturn = read_field(&call, &motion, &values[i]);
    }
    return NVML_SUCCESS;
}
