/* What may stand in the control file.
 *
 * A line is "<GPU or *> <key>[:<detail>] <value>"; # begins a comment; a later line overrides an
 * earlier one. Numbers of GPUs are those of the hardware and do not change with the index. Keys:
 * those of settings.def, and
 *
 *   profile NAME                    kind of GPU (profiles.c); else FAKENVML_PROFILE, else h100
 *   driver_version TEXT             (for all)
 *   order N,N,...                   (for all) GPUs in the order of their indices
 *   error:FUNCTION CODE             the function returns this code
 *   hang:FUNCTION 1                 the function does not return until this is taken back
 *   latency_us:FUNCTION N           what the function takes, instead of latency_us
 *   field_error:FIELD CODE          nvmlReturn of a field value; below 0: it is left out
 *   field_value:FIELD N             value of a field; a double with a point in it, or nan
 *   field_fails_call:FIELD CODE     nvmlDeviceGetFieldValues as a whole returns this code
 *   event:SEQUENCE TYPE DATA [GI CI]  an event; sequence numbers rise; TYPE 8 is an XID
 *   mig none | default | SLOT=PROFILE/GI/CI ...   MIG mode is on, with these devices
 *   processes none | PID/MIB[/KIND[/GI/CI]] ...   PID may be "self", MIB "na"; KIND C, G or M
 *
 * FAKENVML_GPUS: how many GPUs, if the file does not say.
 */
#include "fakenvml.h"

#include <unistd.h>

#define FUNCTION(name) #name,
static const char *const function_names[] = {FUNCTIONS(FUNCTION)};
#undef FUNCTION

#define SETTING(name, otherwise, meaning) #name,
static const char *const setting_names[] = {
#include "settings.def"
};
#undef SETTING
#define SETTING(name, otherwise, meaning) otherwise,
static const double setting_defaults[] = {
#include "settings.def"
};
#undef SETTING

/* A mistake in the control file is one of the test: nothing to go on with. */
static void refuse(const char *line)
{
    fprintf(stderr, "fakenvml: cannot understand in the control file: %s\n", line);
    abort();
}

static int index_of(const char *name, const char *const *names, int count)
{
    for (int i = 0; i < count; i++)
        if (!strcmp(names[i], name))
            return i;
    return -1;
}

static void set_defaults(gpu_control_t *row)
{
    const char *profile = getenv("FAKENVML_PROFILE");
    memset(row, 0, sizeof *row);
    memcpy(row->settings, setting_defaults, sizeof row->settings);
    for (int i = 0; i < FUNCTION_COUNT; i++)
        row->latency_us[i] = NAN;
    row->latency_us[F_nvmlDeviceGetPcieThroughput] = 20000; /* nvml.h: over a 20 ms interval */
    row->profile = profile_named(profile ? profile : "h100");
    if (!row->profile)
        refuse(profile);
    row->processes[0] = (process_t){(unsigned)getpid(), NO_INSTANCE, NO_INSTANCE, 0, 'C'};
    row->process_count = 1;
}

static void set_processes(gpu_control_t *row, char *text)
{
    char *rest = NULL;
    row->process_count = 0;
    for (char *word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        char pid[16], memory[24];
        process_t process = {.gi = NO_INSTANCE, .ci = NO_INSTANCE, .kind = 'C'};
        if (!strcmp(word, "none"))
            continue;
        if (sscanf(word, "%15[^/]/%23[^/]/%c/%u/%u", pid, memory, &process.kind, &process.gi,
                   &process.ci) < 2 ||
            row->process_count == MAX_PROCESSES)
            refuse(word);
        process.pid = strcmp(pid, "self") ? (unsigned)atoi(pid) : (unsigned)getpid();
        process.memory_bytes = strcmp(memory, "na") ? strtoull(memory, NULL, 10) * MIB : ~0ULL;
        row->processes[row->process_count++] = process;
    }
}

static const mig_profile_t *mig_profile(const profile_t *profile, const char *name)
{
    for (int i = 0; i < MAX_MIG_PROFILES && profile->mig[i].name; i++)
        if (!strcmp(profile->mig[i].name, name))
            return &profile->mig[i];
    return NULL;
}

/* Compute instances share the slices of their GPU instance evenly. */
static void divide_instances(gpu_control_t *row)
{
    for (unsigned i = 0; i < row->mig_count; i++) {
        unsigned sharing = 0;
        for (unsigned j = 0; j < row->mig_count; j++)
            sharing += row->mig[j].gi == row->mig[i].gi;
        row->mig[i].compute_slices = row->mig[i].profile->slices / sharing;
    }
}

static void lay_out_mig(gpu_control_t *row)
{
    char text[sizeof row->mig_layout], *rest = NULL;
    row->mig_mode = *row->mig_layout && row->profile->mig[0].name;
    row->mig_count = 0;
    if (!row->mig_mode || !strcmp(row->mig_layout, "none"))
        return;
    memcpy(text, row->mig_layout, sizeof text);
    for (char *word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        char name[16];
        mig_t mig;
        if (sscanf(word, "%u=%15[^/]/%u/%u", &mig.slot, name, &mig.gi, &mig.ci) != 4)
            refuse(word);
        mig.profile = mig_profile(row->profile, name);
        if (!mig.profile || row->mig_count == MAX_MIG_DEVICES)
            refuse(word);
        row->mig[row->mig_count++] = mig;
    }
    divide_instances(row);
}

static void add_event(control_t *new, unsigned gpu, const char *sequence, const char *text)
{
    event_t event = {gpu, NO_INSTANCE, NO_INSTANCE, strtoull(sequence, NULL, 10), 0, 0};
    if (sscanf(text, "%lli %lli %u %u", (long long *)&event.type, (long long *)&event.data,
               &event.gi, &event.ci) < 2 ||
        new->event_count == MAX_EVENTS)
        refuse(text);
    new->events[new->event_count++] = event;
}

static bool set_of_function(gpu_control_t *row, const char *key, int function, double value)
{
    if (!strcmp(key, "error"))
        row->error[function] = (int)value;
    else if (!strcmp(key, "hang"))
        row->hang[function] = value != 0;
    else if (!strcmp(key, "latency_us"))
        row->latency_us[function] = value;
    else
        return false;
    return true;
}

/* With a point, or nan, a double; else a whole number. */
static void set_value(gpu_control_t *row, unsigned long field, const char *text)
{
    bool is_double = strchr(text, '.') || strstr(text, "nan");
    row->field_is_set[field] = true;
    row->field_type[field] =
        is_double ? NVML_VALUE_TYPE_DOUBLE : NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    if (is_double)
        row->field_value[field].dVal = strtod(text, NULL);
    else
        row->field_value[field].ullVal = strtoull(text, NULL, 0);
}

static bool set_of_field(gpu_control_t *row, const char *key, const char *detail, const char *text)
{
    unsigned long field = strtoul(detail, NULL, 10);
    if (field >= MAX_FIELDS)
        return false;
    if (!strcmp(key, "field_error"))
        row->field_error[field] = atoi(text);
    else if (!strcmp(key, "field_fails_call"))
        row->field_fails_call[field] = atoi(text);
    else if (!strcmp(key, "field_value"))
        set_value(row, field, text);
    else
        return false;
    return true;
}

static bool set_text(gpu_control_t *row, const char *key, char *text)
{
    if (!strcmp(key, "profile"))
        return (row->profile = profile_named(text)) != NULL;
    if (!strcmp(key, "mig"))
        snprintf(row->mig_layout, sizeof row->mig_layout, "%s",
                 strcmp(text, "default")
                     ? text
                     : "0=3g.40gb/1/0 2=1g.10gb/9/0 3=1g.10gb/10/0 5=2g.20gb/5/0 6=2g.20gb/5/1");
    else if (!strcmp(key, "processes"))
        set_processes(row, text);
    else
        return false;
    return true;
}

static bool set_in_row(gpu_control_t *row, const char *key, const char *detail, const char *value)
{
    char text[512];
    int setting_index = index_of(key, setting_names, SETTING_COUNT);
    int function = detail ? index_of(detail, function_names, FUNCTION_COUNT) : -1;
    if (function >= 0)
        return set_of_function(row, key, function, strtod(value, NULL));
    if (detail)
        return set_of_field(row, key, detail, value);
    snprintf(text, sizeof text, "%s", value);
    if (setting_index < 0)
        return set_text(row, key, text);
    row->settings[setting_index] = strtod(value, NULL);
    return true;
}

static void set_order(control_t *new, const char *text)
{
    char copy[256], *rest = NULL;
    unsigned place = 0;
    snprintf(copy, sizeof copy, "%s", text);
    for (char *word = strtok_r(copy, ", ", &rest); word; word = strtok_r(NULL, ", ", &rest))
        if (place < MAX_GPUS)
            new->order[place++] = (unsigned)atoi(word) % MAX_GPUS;
}

static void read_line(control_t *new, char *line)
{
    char who[8], key[96], value[512] = "", whole[640], *detail;
    line[strcspn(line, "#\n")] = 0;
    snprintf(whole, sizeof whole, "%s", line);
    int words = sscanf(line, "%7s %95s %511[^\n]", who, key, value);
    if (words <= 0)
        return;
    if (words < 3)
        refuse(whole);
    unsigned first = *who == '*' ? 0 : (unsigned)atoi(who), last = *who == '*' ? LIBRARY : first;
    if (last > LIBRARY)
        refuse(whole);
    if ((detail = strchr(key, ':')))
        *detail++ = 0;
    if (!strcmp(key, "event") && detail)
        add_event(new, first, detail, value);
    else if (!strcmp(key, "order"))
        set_order(new, value);
    else if (!strcmp(key, "driver_version"))
        snprintf(new->driver_version, sizeof new->driver_version, "%.63s", value);
    else
        for (unsigned row = first; row <= last; row++)
            if (!set_in_row(&new->rows[row], key, detail, value))
                refuse(whole);
}

/* The GPUs that are there, in the order of their indices. */
static void enumerate(control_t *new)
{
    const char *from_environment = getenv("FAKENVML_GPUS");
    double otherwise = from_environment ? atoi(from_environment) : 8;
    double gpus = setting(&new->rows[LIBRARY], SET_gpus, otherwise);
    unsigned order[MAX_GPUS];
    memcpy(order, new->order, sizeof order);
    new->count = 0;
    for (unsigned i = 0; i < MAX_GPUS; i++) {
        unsigned gpu = order[i];
        if (gpu < gpus && new->rows[gpu].settings[SET_absent] == 0)
            new->order[new->count++] = gpu;
    }
}

void read_control(control_t *new, const char *path)
{
    char line[640];
    FILE *file = path ? fopen(path, "r") : NULL;
    new->event_count = 0;
    snprintf(new->driver_version, sizeof new->driver_version, "580.105.08");
    for (unsigned row = 0; row <= LIBRARY; row++)
        set_defaults(&new->rows[row]);
    for (unsigned i = 0; i < MAX_GPUS; i++)
        new->order[i] = i;
    while (file && fgets(line, sizeof line, file))
        read_line(new, line);
    if (file)
        fclose(file);
    for (unsigned row = 0; row < MAX_GPUS; row++)
        lay_out_mig(&new->rows[row]);
    enumerate(new);
}
