// CUDA threads on a CPU. A launch is one OS thread, whose CUDA threads are fibers: each runs until
// it waits or, by chance, where others may see what it has done, so that any order comes up. Under
// ThreadSanitizer, which is to see races, each is an OS thread.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

namespace rc {

// What was given to the thread that runs.
inline thread_local void* own = nullptr;

// Threads that only yield keep those from running that they wait for, where there are few cores.
inline void nap(unsigned turns = 0) {
    const timespec time = {0, turns < 3 ? 100000 : 300000};
    nanosleep(&time, nullptr);
}

#if defined(__SANITIZE_THREAD__)

void pause() {
    static thread_local unsigned times = 0;
    if (++times % 4 == 0)
        nap();
    else
        sched_yield();
}
inline void wrote() {}
inline void step() {}

struct Barrier {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    unsigned come, round;
};

inline void arrive(Barrier& barrier, unsigned count, bool stays = false) {
    pthread_mutex_lock(&barrier.lock);
    const unsigned round = barrier.round;
    if (++barrier.come == count) {
        barrier.come = 0;
        ++barrier.round;
        pthread_cond_broadcast(&barrier.ended);
    }
    while (stays && barrier.round == round) pthread_cond_wait(&barrier.ended, &barrier.lock);
    pthread_mutex_unlock(&barrier.lock);
}
inline void meet(Barrier& barrier, unsigned count) { arrive(barrier, count, true); }

// Calls body(first), body(first + size), and so on, at the same time.
inline void side_by_side(void* (*body)(void*), void* first, size_t size, unsigned number) {
    auto* all = static_cast<pthread_t*>(calloc(number, sizeof(pthread_t)));
    for (unsigned n = 0; n < number; ++n)
        if (pthread_create(&all[n], nullptr, body, static_cast<char*>(first) + n * size)) abort();
    for (unsigned n = 0; n < number; ++n) pthread_join(all[n], nullptr);
    free(all);
}

#else

struct Stack {
    Stack* next;
};
constexpr size_t STACK = 256 << 10, PAGE = 4096;

struct Fiber {
    jmp_buf place;
    Stack* stack;
    void* argument;
    bool begun, ended;
};

// What one OS thread runs.
struct Fibers {
    jmp_buf home;
    void* (*body)(void*);
    Fiber* now;
    bool busy;  // Somebody has done something that others may wait for.
    unsigned dice;
};
inline thread_local Fibers fibers;

inline pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
inline Stack* pool = nullptr;

// The highest bytes of a stack say which one is next in the pool; its lowest page is a wall.
inline Stack* take_stack() {
    pthread_mutex_lock(&pool_lock);
    Stack* found = pool;
    if (found) pool = found->next;
    pthread_mutex_unlock(&pool_lock);
    if (found) return found;
    void* made = mmap(nullptr, STACK, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (made == MAP_FAILED || mprotect(made, PAGE, PROT_NONE)) abort();
    return reinterpret_cast<Stack*>(static_cast<char*>(made) + STACK - PAGE);
}

inline void return_stack(Stack* stack) {
    pthread_mutex_lock(&pool_lock);
    stack->next = pool;
    pool = stack;
    pthread_mutex_unlock(&pool_lock);
}

inline void leave() {
    if (!_setjmp(fibers.now->place)) _longjmp(fibers.home, 1);
}

inline void fiber() {
    fibers.body(fibers.now->argument);
    fibers.now->ended = fibers.busy = true;
    _longjmp(fibers.home, 1);
}

inline void enter(Fiber* next) {
    fibers.now = next;
    own = next->argument;
    if (_setjmp(fibers.home)) return;
    if (next->begun) _longjmp(next->place, 1);
    next->begun = true;
    next->stack = take_stack();
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = reinterpret_cast<char*>(next->stack) + PAGE - STACK;
    context.uc_stack.ss_size = STACK - PAGE;
    context.uc_link = nullptr;
    makecontext(&context, fiber, 0);
    setcontext(&context);
}

void pause() { leave(); }

// Somebody may have waited for what is written now.
inline void wrote() { fibers.busy = true; }

// Here others may run.
inline unsigned chance() {
    fibers.dice ^= fibers.dice << 13;
    fibers.dice ^= fibers.dice >> 17;
    return fibers.dice ^= fibers.dice << 5;
}
inline void step() {
    if (chance() % 8) return;
    fibers.busy = true;
    leave();
}

struct Barrier {
    unsigned come, round;
};

inline void arrive(Barrier& barrier, unsigned count) {
    step();
    if (++barrier.come != count) return;
    barrier.come = 0;
    ++barrier.round;
    wrote();
}
inline void meet(Barrier& barrier, unsigned count) {
    const unsigned round = barrier.round;
    arrive(barrier, count);
    while (barrier.round == round) pause();
}

inline void side_by_side(void* (*body)(void*), void* first, size_t size, unsigned number) {
    static unsigned launches = 0;
    auto* all = static_cast<Fiber*>(calloc(number, sizeof(Fiber)));
    for (unsigned n = 0; n < number; ++n) all[n].argument = static_cast<char*>(first) + n * size;
    fibers.body = body;
    fibers.dice = 1 + __atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED) * 2;
    // Now and then one of them stands still, and others run ahead until they wait for it.
    Fiber* still = nullptr;
    unsigned left = number, rounds = 0, idle = 0;
    while (left) {
        fibers.busy = false;
        const unsigned begin = chance() % number;
        if (rounds == 0) {
            rounds = 1 + chance() % 512;
            still = chance() % 2 ? &all[chance() % number] : nullptr;
        }
        --rounds;
        for (unsigned k = 0; k < number; ++k) {
            Fiber* next = &all[(begin + k) % number];
            if (next->ended || next == still) continue;
            enter(next);
            if (!next->ended) continue;
            return_stack(next->stack);
            --left;
        }
        if (fibers.busy) {
            idle = 0;
        } else if (still) {
            still = nullptr;
        } else {
            nap(++idle);
        }
    }
    free(all);
}

#endif

}  // namespace rc
