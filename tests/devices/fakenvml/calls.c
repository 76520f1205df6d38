/* The call counters: FAKENVML_CALLS names a file that is mapped by all processes.
 *
 * It holds the number of functions, and then a counter for each GPU and function; the last row is
 * that of calls on no GPU.
 */
#include "fakenvml.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

static _Atomic(_Atomic uint64_t *) counters;

void map_counters(void)
{
    const char *path = getenv("FAKENVML_CALLS");
    size_t size = (1 + (MAX_GPUS + 1) * FUNCTION_COUNT) * sizeof(uint64_t);
    int file = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644) : -1;
    if (file < 0)
        return;
    if (ftruncate(file, (off_t)size) == 0) {
        void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (map != MAP_FAILED) {
            ((uint64_t *)map)[0] = FUNCTION_COUNT;
            counters = (_Atomic uint64_t *)map + 1;
        }
    }
    close(file);
}

void count_call(unsigned row, function_t function)
{
    _Atomic uint64_t *of = atomic_load_explicit(&counters, memory_order_relaxed);
    if (of)
        atomic_fetch_add_explicit(&of[row * FUNCTION_COUNT + function], 1, memory_order_relaxed);
}
