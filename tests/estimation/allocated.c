/* Counts the bytes of large blocks that a process has allocated: preloaded, it stands before glibc's allocator. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

enum { SMALLEST = 16384 };
static atomic_long held, most;

static long size_of(void *block) {
    size_t size = block ? malloc_usable_size(block) : 0;
    return size >= SMALLEST ? (long)size : 0;
}

static void count(long change) {
    if (!change) return;
    long now = atomic_fetch_add(&held, change) + change, seen = atomic_load(&most);
    while (now > seen && !atomic_compare_exchange_weak(&most, &seen, now)) {}
}

void *malloc(size_t size) { void *block = __libc_malloc(size); count(size_of(block)); return block; }
void *calloc(size_t n, size_t size) { void *block = __libc_calloc(n, size); count(size_of(block)); return block; }
void *realloc(void *old, size_t size) {
    long before = size_of(old);
    void *block = __libc_realloc(old, size);
    if (block || !size) count(size_of(block) - before);
    return block;
}
void *memalign(size_t alignment, size_t size) {
    void *block = __libc_memalign(alignment, size);
    count(size_of(block));
    return block;
}
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
int posix_memalign(void **place, size_t alignment, size_t size) {
    void *block = memalign(alignment, size);
    if (!block) return ENOMEM;
    *place = block;
    return 0;
}
void free(void *block) { count(-size_of(block)); __libc_free(block); }

long allocated_held(void) { return atomic_load(&held); }
long allocated_most(void) { return atomic_load(&most); }
void allocated_reset(void) { atomic_store(&most, atomic_load(&held)); }
