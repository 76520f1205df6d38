/* The state that the control file describes, and the clocks.
 *
 * FAKENVML_CONTROL names the file (control_file.c); it is read at the first call, and again when it
 * was replaced, which is looked for every 20 ms; at every call once the clock was set by hand.
 */
#include "fakenvml.h"

#include <pthread.h>
#include <sys/stat.h>
#include <time.h>

enum { GENERATIONS = 8, CHECK_EVERY_NS = 20 * 1000 * 1000 };

/* Old generations stay readable: a call holds one only for its own duration. */
static control_t generations[GENERATIONS];
static _Atomic(const control_t *) current;
static _Atomic long long next_check_ns;
static pthread_mutex_t reading = PTHREAD_MUTEX_INITIALIZER;
static unsigned generation;
static struct stat seen;
static double wall_offset_s;
/* Set by the control file; NAN: the machine's. */
static _Atomic double set_monotonic_s = NAN;
static _Atomic bool check_always;

static long long clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

bool clock_is_set(void) { return !isnan(set_monotonic_s); }

double monotonic_s(void)
{
    double set_s = set_monotonic_s;
    return isnan(set_s) ? (double)clock_ns(CLOCK_MONOTONIC) / 1e9 : set_s;
}

unsigned long long wall_us(double monotonic)
{
    return (unsigned long long)((monotonic + wall_offset_s) * 1e6);
}

double setting(const gpu_control_t *row, setting_t name, double of_profile)
{
    double value = row->settings[name];
    return isnan(value) ? of_profile : value;
}

static void set_clock(const gpu_control_t *row)
{
    double now_s = row->settings[SET_monotonic_s];
    if (!isnan(now_s)) {
        wall_offset_s = row->settings[SET_wall_s] - now_s;
        check_always = true;
    }
    set_monotonic_s = now_s;
}

static bool changed(const char *path)
{
    struct stat now;
    if (!path || stat(path, &now) != 0)
        return false;
    bool same = now.st_ino == seen.st_ino && now.st_size == seen.st_size &&
                now.st_mtim.tv_sec == seen.st_mtim.tv_sec &&
                now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec;
    seen = now;
    return !same;
}

static void read_again(void)
{
    const char *path = getenv("FAKENVML_CONTROL");
    const control_t *before = atomic_load(&current);
    bool is_new = changed(path);
    if (before && !is_new)
        return;
    control_t *new = &generations[generation++ % GENERATIONS];
    if (before)
        move_all(before);
    else
        map_counters();
    if (!before)
        wall_offset_s = (double)(clock_ns(CLOCK_REALTIME) - clock_ns(CLOCK_MONOTONIC)) / 1e9;
    read_control(new, path);
    set_clock(&new->rows[LIBRARY]);
    atomic_store(&current, new);
}

const control_t *control(void)
{
    long long now_ns = clock_ns(CLOCK_MONOTONIC);
    const control_t *known = atomic_load_explicit(&current, memory_order_acquire);
    if (known && now_ns < atomic_load_explicit(&next_check_ns, memory_order_relaxed))
        return known;
    if (!known || check_always)
        pthread_mutex_lock(&reading);
    else if (pthread_mutex_trylock(&reading) != 0)
        return known;
    read_again();
    atomic_store(&next_check_ns, check_always ? 0 : now_ns + CHECK_EVERY_NS);
    pthread_mutex_unlock(&reading);
    return atomic_load(&current);
}
