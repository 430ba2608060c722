// CUDA C on a CPU: this header stands in for CUDA's own when g++ compiles a kernel.
//
//   1. how a grid runs      one fiber for each thread of a block, one block at a time
//   2. what threads share   barriers, warp shuffles and votes, atomics
//   3. numbers              vector types, __half, __nv_bfloat16, intrinsics
//   4. the door             launches, called by gxx.py or by a process of its own
//
// A fiber runs until it must wait for others; then the next one that need not wait goes
// on. So a block needs no locks, its threads take turns in a fixed order, and a wait that
// nobody can end is found at once and reported with the lines where threads stand.
#pragma once
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define alignas(bytes) __align__(bytes)  // which g++ takes after __shared__, too
#define __launch_bounds__(...)

// Shared memory: blocks run one after another, so a static variable is the block's own.
// Each block finds it full of NaN: all of it is in one section of the library. Not so with
// AddressSanitizer, which guards no variable that has a section of its own.
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define __shared__ static
#else
#define __shared__ static __attribute__((section("cuda_shared")))
#endif
extern char __start_cuda_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_cuda_shared[] __attribute__((weak, visibility("hidden")));

// --- 1. how a grid runs ----------------------------------------------------------------
struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

namespace cpu {

constexpr unsigned WARP = 32, MAX_THREADS = 1024;
constexpr size_t STACK = 256 << 10;        // bytes of a fiber's stack
constexpr size_t STRIDE = STACK + 5 * 64;  // stacks apart, or they share few cache sets

// Where in the source a thread waits.
struct Site {
    const char* file;
    int line;
    bool operator==(Site other) const { return line == other.line && file == other.file; }
};

struct Thread {
    uint3 index;
    Site site;
    uint64_t value, result;  // what it gives to the other lanes, and what it gets
    unsigned source;         // the lane that it reads
};

// Lanes of a warp that must meet at one line; `mask` names them.
struct Meeting {
    unsigned mask, arrived;
    Site site;
};

struct Warp {
    unsigned alive, ready;   // a bit for each lane: has not returned; need not wait
    unsigned open;           // a bit for each meeting that goes on
    Meeting meetings[WARP];  // by the lane that came first
};

static Thread threads[MAX_THREADS];
static Warp warps[MAX_THREADS / WARP];
static unsigned n_warps, running, current;  // running: threads that have not returned
static unsigned at_barrier;                 // threads that wait in __syncthreads
static Site barrier;
static uint3 block_index;
static dim3 block_size, grid_size;
static char* stacks;
static void (*kernel_call)(void**);
static void** kernel_args;
static char fault[512];  // "" while nothing is wrong

static unsigned lane() { return current % WARP; }
static Warp& warp() { return warps[current / WARP]; }
static char* stack(unsigned i) { return stacks + i * STRIDE; }
static const char* name(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

constexpr unsigned HOST = MAX_THREADS;  // the fiber that started the grid
static void run_thread();

#if defined(__x86_64__) && !defined(CUDA_CPU_UCONTEXT)
// A fiber's state is its stack pointer; the registers that a call must keep lie on the stack.
static void* stack_pointer[MAX_THREADS + 1];
extern "C" void cuda_cpu_switch(void** save, void* to) __attribute__((visibility("hidden")));
asm(R"(
.text
.globl cuda_cpu_switch
.hidden cuda_cpu_switch
.type cuda_cpu_switch, @function
cuda_cpu_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
.size cuda_cpu_switch, .-cuda_cpu_switch
)");
static void prepare(unsigned i) {
    // As if run_thread had called: six registers, the address to go to, and no caller.
    void** top = reinterpret_cast<void**>(stack(i) + STACK - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(run_thread);
    for (int k = 0; k < 6; k++) *--top = nullptr;
    stack_pointer[i] = top;
}
static void jump(unsigned from, unsigned to) {
    cuda_cpu_switch(&stack_pointer[from], stack_pointer[to]);
}
#else
#include <ucontext.h>
static ucontext_t contexts[MAX_THREADS + 1];
static void prepare(unsigned i) {
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = stack(i);
    contexts[i].uc_stack.ss_size = STACK;
    makecontext(&contexts[i], run_thread, 0);
}
static void jump(unsigned from, unsigned to) { swapcontext(&contexts[from], &contexts[to]); }
#endif

static void go(unsigned to, [[maybe_unused]] bool for_ever = false) {
    unsigned from = current;
    if (from == to) return;
    current = to;
#ifdef __SANITIZE_ADDRESS__
    static void* fake_stack[MAX_THREADS + 1];
    const void* bottom = to == HOST ? nullptr : stack(to);
    __sanitizer_start_switch_fiber(for_ever ? nullptr : &fake_stack[from], bottom, STACK);
    jump(from, to);
    __sanitizer_finish_switch_fiber(fake_stack[from], nullptr, nullptr);
#else
    jump(from, to);
#endif
}

// Ends the grid: what the threads were doing is forgotten.
[[noreturn]] static void fail() {
    go(HOST, true);
    abort();
}
template <class... A>
[[noreturn]] static void fail(const char* format, A... values) {
    size_t n = snprintf(fault, sizeof fault, format, values...);
    if (n < sizeof fault && current != HOST)
        snprintf(fault + n, sizeof fault - n, " (block %u, thread %u)", block_index.x, current);
    fail();
}

static void report_stuck() {
    // Barriers and meetings of lanes are all blocked: name two threads at different lines.
    unsigned n = block_size.x, a = n, b = n;
    for (unsigned i = 0; i < n; i++) {
        if (!(warps[i / WARP].alive >> i % WARP & 1)) continue;
        if (a == n) a = i;
        if (b == n && !(threads[i].site == threads[a].site)) b = i;
    }
    Site s = threads[a].site, t = threads[b == n ? a : b].site;
    if (b == n) fail("threads wait for ever at %s:%d", name(s.file), s.line);
    fail("threads wait for ever: thread %u at %s:%d, thread %u at %s:%d", a, name(s.file),
         s.line, b, name(t.file), t.line);
}

// The next thread that need not wait: of this warp, or else of the next warp that has one.
static void go_on(bool for_ever = false) {
    unsigned w = current / WARP;
    for (unsigned k = 0; k < n_warps; k++, w = w + 1 == n_warps ? 0 : w + 1) {
        unsigned ready = warps[w].ready;
        if (!ready) continue;
        unsigned later = k == 0 && lane() < WARP - 1 ? ready & ~0u << (lane() + 1) : 0;
        return go(w * WARP + __builtin_ctz(later ? later : ready), for_ever);
    }
    report_stuck();
}

static void wait() {
    warp().ready &= ~(1u << lane());
    go_on();
}

// --- 2. what threads share -------------------------------------------------------------
static void open_barrier() {
    at_barrier = 0;
    for (unsigned w = 0; w < n_warps; w++) warps[w].ready = warps[w].alive;
}

constexpr unsigned VOTE = WARP;  // in place of a lane: a bit for each lane, value != 0

static void give_values(Warp& w, unsigned present) {
    Thread* lanes = threads + (&w - warps) * WARP;
    unsigned votes = 0;
    for (unsigned i = 0; i < WARP; i++)
        if (present >> i & 1 && lanes[i].value) votes |= 1u << i;
    for (unsigned rest = present; rest; rest &= rest - 1) {
        Thread& t = lanes[__builtin_ctz(rest)];
        if (t.source != VOTE && !(present >> t.source & 1))
            fail("%s:%d: a shuffle reads lane %u, which has returned or is not in its mask",
                 name(t.site.file), t.site.line, t.source);
        t.result = t.source == VOTE ? votes : lanes[t.source].value;
    }
}

// The meeting at this line of the lanes in `mask`; opened if nobody is there.
static Meeting& meeting(Warp& w, unsigned mask, Site site) {
    for (unsigned rest = w.open; rest; rest &= rest - 1) {
        Meeting& m = w.meetings[__builtin_ctz(rest)];
        if (m.mask == mask && m.site == site) return m;
    }
    w.open |= 1u << lane();
    return w.meetings[lane()] = {mask, 0, site};
}

// Ends a meeting if all are there who have not returned.
static bool complete(Warp& w, Meeting& m) {
    if (m.arrived != (m.mask & w.alive)) return false;
    give_values(w, m.arrived);
    w.ready |= m.arrived;
    w.open &= ~(1u << (&m - w.meetings));
    return true;
}

// All lanes of `mask` meet here; each gives a value and gets that of lane `source`.
static uint64_t exchange(unsigned mask, uint64_t value, unsigned source, Site site) {
    Thread& me = threads[current];
    Warp& w = warp();
    if (!(mask >> lane() & 1))
        fail("%s:%d: lane %u is not in its own mask %08x", name(site.file), site.line, lane(),
             mask);
    me.site = site, me.value = value, me.source = source;
    Meeting& m = meeting(w, mask, site);
    m.arrived |= 1u << lane();
    if (!complete(w, m)) wait();
    return me.result;
}

static void sync_threads(Site site) {
    threads[current].site = site;
    if (at_barrier && !(barrier == site))
        fail("divergent barrier: threads wait at %s:%d and at %s:%d", name(barrier.file),
             barrier.line, name(site.file), site.line);
    barrier = site;
    if (++at_barrier == running) return open_barrier();
    wait();
}

// One thread, from its first line to its return.
static void run_thread() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
    kernel_call(kernel_args);
    Warp& w = warp();
    unsigned me = 1u << lane();
    w.alive &= ~me, w.ready &= ~me;
    running--;
    for (unsigned rest = w.open; rest; rest &= rest - 1)
        complete(w, w.meetings[__builtin_ctz(rest)]);
    if (at_barrier && at_barrier == running) open_barrier();
    if (running == 0) go(HOST, true);
    go_on(true);
    abort();  // nobody comes back
}

static void run_block(unsigned index) {
    block_index = {index, 0, 0};
    running = block_size.x, at_barrier = 0;
    if (__start_cuda_shared)
        memset(__start_cuda_shared, 0xFF, __stop_cuda_shared - __start_cuda_shared);
    memset(warps, 0, n_warps * sizeof(Warp));
    for (unsigned i = 0; i < block_size.x; i++) {
        prepare(i);
        threads[i].index = {i, 0, 0};
        warps[i / WARP].alive |= 1u << i % WARP;
    }
    for (unsigned w = 0; w < n_warps; w++) warps[w].ready = warps[w].alive;
    go(0);
}

}  // namespace cpu

#define threadIdx (cpu::threads[cpu::current].index)
#define blockIdx (cpu::block_index)
#define blockDim (cpu::block_size)
#define gridDim (cpu::grid_size)
constexpr int warpSize = 32;

// The line of the caller: a default argument is evaluated where the call stands.
#define CPU_SITE cpu::Site site = {__builtin_FILE(), __builtin_LINE()}

inline void __syncthreads(CPU_SITE) { cpu::sync_threads(site); }
inline void __syncwarp(unsigned mask = ~0u, CPU_SITE) {
    cpu::exchange(mask, 0, cpu::VOTE, site);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline unsigned __activemask() { return cpu::warp().alive; }

inline unsigned __ballot_sync(unsigned mask, int predicate, CPU_SITE) {
    return cpu::exchange(mask, predicate != 0, cpu::VOTE, site);
}
inline int __any_sync(unsigned mask, int predicate, CPU_SITE) {
    return cpu::exchange(mask, predicate != 0, cpu::VOTE, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CPU_SITE) {
    return cpu::exchange(mask, predicate == 0, cpu::VOTE, site) == 0;
}

namespace cpu {
// A shuffle in segments of `width` lanes; a lane that points outside reads itself.
template <class T>
T shuffle(unsigned mask, T value, int source, int width, Site site) {
    static_assert(sizeof(T) <= 8);
    int mine = lane(), first = mine & -width;
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    if (source < first || source >= first + width) source = mine;
    bits = exchange(mask, bits, source, site);
    memcpy(&value, &bits, sizeof value);
    return value;
}
}  // namespace cpu

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, CPU_SITE) {
    int first = cpu::lane() & -width;
    return cpu::shuffle(mask, value, first | (source & (width - 1)), width, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CPU_SITE) {
    return cpu::shuffle(mask, value, int(cpu::lane()) - int(delta), width, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CPU_SITE) {
    return cpu::shuffle(mask, value, cpu::lane() + delta, width, site);
}
// The one that can look back into an earlier segment, though not ahead into a later one.
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, CPU_SITE) {
    int source = cpu::lane() ^ lanes, end = (cpu::lane() & -width) + width;
    return cpu::shuffle(mask, value, source < end ? source : int(cpu::lane()), 32, site);
}

// No other thread runs in between: plain code is atomic. All return the old value.
#define CPU_ATOMIC(name, expression)    \
    template <class T>                  \
    T name(T* p, std::common_type_t<T> value) { \
        T old = *p;                     \
        *p = expression;                \
        return old;                     \
    }
CPU_ATOMIC(atomicAdd, old + value)
CPU_ATOMIC(atomicSub, old - value)
CPU_ATOMIC(atomicMax, old > value ? old : value)
CPU_ATOMIC(atomicMin, old < value ? old : value)
CPU_ATOMIC(atomicExch, value)
CPU_ATOMIC(atomicAnd, old & value)
CPU_ATOMIC(atomicOr, old | value)
CPU_ATOMIC(atomicXor, old ^ value)
template <class T>
T atomicCAS(T* p, std::common_type_t<T> compare, std::common_type_t<T> value) {
    T old = *p;
    if (old == compare) *p = value;
    return old;
}

// --- 3. numbers ------------------------------------------------------------------------
#define CPU_VECTOR2(T, name, bytes)                    \
    struct alignas(bytes) name {                       \
        T x, y;                                        \
    };                                                 \
    inline name make_##name(T x, T y) { return {x, y}; }
#define CPU_VECTOR4(T, name, bytes)                    \
    struct alignas(bytes) name {                       \
        T x, y, z, w;                                  \
    };                                                 \
    inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }
CPU_VECTOR2(int, int2, 8)
CPU_VECTOR2(unsigned, uint2, 8)
CPU_VECTOR2(float, float2, 8)
CPU_VECTOR4(int, int4, 16)
CPU_VECTOR4(unsigned, uint4, 16)
CPU_VECTOR4(float, float4, 16)

namespace cpu {
template <class To, class From>
To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
}  // namespace cpu
inline unsigned __float_as_uint(float x) { return cpu::bits_as<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return cpu::bits_as<float>(x); }
inline int __float_as_int(float x) { return cpu::bits_as<int>(x); }
inline float __int_as_float(int x) { return cpu::bits_as<float>(x); }

// binary16: 1 sign, 5 exponent, 10 fraction bits. Rounded half to even.
struct alignas(2) __half {
    uint16_t bits;
    __half() = default;
    __half(float x);
    operator float() const;
};
inline __half __ushort_as_half(unsigned short bits) {
    __half h;
    h.bits = bits;
    return h;
}
inline unsigned short __half_as_ushort(__half h) { return h.bits; }

inline float __half2float(__half h) {
    unsigned sign = (h.bits & 0x8000u) << 16, rest = (h.bits & 0x7FFFu) << 13;
    if (rest >= 0x7C00u << 13)  // infinity or NaN
        return __uint_as_float(sign | 0x7F800000u | rest);
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(rest) * 0x1p112f));
}
inline __half __float2half(float x) {
    unsigned u = __float_as_uint(x), sign = u >> 16 & 0x8000u, rest = u & 0x7FFFFFFFu;
    if (rest > 0x7F800000u) return __ushort_as_half(0x7FFF);       // NaN
    if (rest >= 0x477FF000u) return __ushort_as_half(sign | 0x7C00);  // 65520 and above
    if (rest < 0x38800000u)  // below 2^-14: the sum's last place is 2^-24, that of a half
        rest = __float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3F000000u;
    else
        rest = (rest + 0xFFFu + (rest >> 13 & 1) - 0x38000000u) >> 13;
    return __ushort_as_half(sign | rest);
}
inline __half::__half(float x) { *this = __float2half(x); }
inline __half::operator float() const { return __half2float(*this); }
inline __half __float2half_rn(float x) { return __float2half(x); }

struct alignas(4) __half2 {
    __half x, y;
    __half2() = default;
    __half2(__half x, __half y) : x(x), y(y) {}
};
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __float2half2_rn(float x) { return {x, x}; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half2 __float22half2_rn(float2 v) { return {v.x, v.y}; }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline __half2 __low2half2(__half2 v) { return {v.x, v.x}; }
inline __half2 __high2half2(__half2 v) { return {v.y, v.y}; }
inline float __low2float(__half2 v) { return v.x; }
inline float __high2float(__half2 v) { return v.y; }

// +, -, * and / in binary32, then rounded to binary16: the same as rounded once.
inline __half __hadd(__half a, __half b) { return float(a) + float(b); }
inline __half __hsub(__half a, __half b) { return float(a) - float(b); }
inline __half __hmul(__half a, __half b) { return float(a) * float(b); }
inline __half __hdiv(__half a, __half b) { return float(a) / float(b); }
inline __half __hfma(__half a, __half b, __half c) {
    // Exact in binary64. Rounded to odd on the way, so that the last rounding is right.
    double exact = double(float(a)) * float(b) + float(c);
    float f = float(exact);
    if (f != exact && f == f) {
        unsigned u = __float_as_uint(f);
        if (fabs(double(f)) > fabs(exact)) u--;
        f = __uint_as_float(u | 1);
    }
    return f;
}
inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}

// bfloat16: the upper half of a binary32, rounded half to even.
struct alignas(2) __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float x) {
        unsigned u = __float_as_uint(x);
        bits = x != x ? 0x7FFF : (u + 0x7FFFu + (u >> 16 & 1)) >> 16;
    }
    operator float() const { return __uint_as_float(unsigned(bits) << 16); }
};
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }

// min and max of numbers of any two types; of floats as in IEEE 754: NaN loses.
template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return T(fmin(a, b));
    else return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return T(fmax(a, b));
    else return T(a) < T(b) ? T(b) : T(a);
}

// Loads and stores that tell a GPU's caches what comes next: here as any other.
#define CPU_LOAD(name) \
    template <class T>  \
    T name(const T* p) { return *p; }
#define CPU_STORE(name) \
    template <class T>   \
    void name(T* p, std::common_type_t<T> value) { *p = value; }
CPU_LOAD(__ldg) CPU_LOAD(__ldca) CPU_LOAD(__ldcg) CPU_LOAD(__ldcs)
CPU_LOAD(__ldlu) CPU_LOAD(__ldcv)
CPU_STORE(__stwb) CPU_STORE(__stcg) CPU_STORE(__stcs) CPU_STORE(__stwt)
template <class T>
void __stwb(T* p, T value) { *p = value; }
// To an integer as a GPU does it: NaN becomes 0, what is too large the largest.
inline int __float2int_rz(float x) {
    if (x != x) return 0;
    return x >= 0x1p31f ? INT32_MAX : x < -0x1p31f ? INT32_MIN : int(x);
}
inline int __float2int_rn(float x) { return __float2int_rz(rintf(x)); }
inline int __float2int_rd(float x) { return __float2int_rz(floorf(x)); }
inline unsigned __float2uint_rn(float x) {
    float r = rintf(x);
    return !(r > 0) ? 0 : r >= 0x1p32f ? UINT32_MAX : unsigned(r);
}
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __mulhi(int a, int b) { return int64_t(a) * b >> 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t(a) * b >> 32; }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return ((uint64_t(high) << 32 | low) << (shift & 31)) >> 32;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (uint64_t(high) << 32 | low) >> (shift & 31);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    uint64_t bytes = uint64_t(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; i++)
        result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
}

// --- 4. the door -----------------------------------------------------------------------
namespace cpu {

// A parameter in two characters: "*2" points to 2 bytes; "i4", "u8", "f4" are numbers.
template <class P>
void put_type(char*& at) {
    constexpr bool pointer = std::is_pointer_v<P>;
    using T = std::remove_pointer_t<P>;
    *at++ = pointer                        ? '*'
            : std::is_floating_point_v<T> ? 'f'
            : std::is_signed_v<T>         ? 'i'
                                          : 'u';
    *at++ = '0' + sizeof(T);
}
template <class... P>
const char* types_of(void (*)(P...)) {
    static char text[2 * sizeof...(P) + 1];
    char* at = text;
    (put_type<P>(at), ...);
    return text;
}

// args[i] points to the value of parameter i.
template <class... P, size_t... I>
void call(void (*kernel)(P...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<P*>(args[I])...);
}
template <class... P>
std::index_sequence_for<P...> places(void (*)(P...)) {
    return {};
}

[[maybe_unused]] static void on_signal(int signal) {
    fail(signal == SIGFPE ? "integer division by zero" : "invalid address");
}

// All blocks of one grid. Returns "", or what went wrong.
template <auto kernel>
const char* launch(unsigned grid, unsigned block, void** args) {
    kernel_call = [](void** args) { call(kernel, args, decltype(places(kernel)){}); };
    kernel_args = args;
    grid_size = {grid}, block_size = {block};
    n_warps = (block + WARP - 1) / WARP;
    stacks = static_cast<char*>(aligned_alloc(64, block * STRIDE));
    current = HOST;
    fault[0] = 0;
#ifndef __SANITIZE_ADDRESS__
    const int signals[] = {SIGSEGV, SIGBUS, SIGFPE};
    struct sigaction before[3], mine = {};
    mine.sa_handler = on_signal;
    mine.sa_flags = SA_NODEFER;  // the handler does not return
    for (int i = 0; i < 3; i++) sigaction(signals[i], &mine, &before[i]);
#endif
    for (unsigned i = 0; i < grid && !fault[0]; i++) run_block(i);
#ifndef __SANITIZE_ADDRESS__
    for (int i = 0; i < 3; i++) sigaction(signals[i], &before[i], nullptr);
#endif
    free(stacks);
    return fault;
}

// The same in a process of its own, for the sanitizers. The file holds int64 grid, block
// and number of arguments, then for each int64 bytes and the bytes; it gets them back.
struct Buffer {
    int64_t bytes;
    char* data;
};
static Buffer buffers[64];
static int n_buffers;

static bool transfer(FILE* file, void* data, size_t bytes, bool write) {
    return (write ? fwrite(data, 1, bytes, file) : fread(data, 1, bytes, file)) == bytes;
}

template <auto kernel>
int run_process(const char* path) {
    int64_t head[3];
    void* args[64];
    const char* types = types_of(kernel);
    FILE* file = fopen(path, "r+b");
    if (!file || !transfer(file, head, sizeof head, false)) return 3;
    n_buffers = head[2];
    for (int i = 0; i < n_buffers; i++) {
        Buffer& b = buffers[i];
        if (!transfer(file, &b.bytes, sizeof b.bytes, false)) return 3;
        if (posix_memalign(reinterpret_cast<void**>(&b.data), 256, b.bytes)) return 3;
        if (!transfer(file, b.data, b.bytes, false)) return 3;
        args[i] = types[2 * i] == '*' ? static_cast<void*>(&b.data) : b.data;
    }
    const char* wrong = launch<kernel>(head[0], head[1], args);
    if (wrong[0]) return fprintf(stderr, "fault: %s\n", wrong), 1;
    rewind(file);
    for (int i = 0; i < n_buffers; i++)
        if (!transfer(file, buffers[i].data, buffers[i].bytes, true)) return 3;
    return fclose(file);
}

}  // namespace cpu

#ifdef __SANITIZE_ADDRESS__
// Which argument, and which thread: the report has the rest.
extern "C" void __asan_on_error() {
    const char* address = static_cast<const char*>(__asan_get_report_address());
    constexpr int64_t NEAR = 4096;
    for (int i = 0; i < cpu::n_buffers; i++) {
        int64_t at = address - cpu::buffers[i].data;
        if (at >= -NEAR && at < cpu::buffers[i].bytes + NEAR)
            fprintf(stderr, "where: byte %lld of argument %d, which has %lld\n",
                    (long long)at, i, (long long)cpu::buffers[i].bytes);
    }
    fprintf(stderr, "thread: block %u, thread %u\n", cpu::block_index.x, cpu::current);
}
#endif

#define CUDA_CPU_EXPORT(kernel)                                                       \
    extern "C" const char* types_##kernel() { return cpu::types_of(kernel); }        \
    extern "C" const char* launch_##kernel(unsigned grid, unsigned block, void** args) { \
        return cpu::launch<kernel>(grid, block, args);                               \
    }
#define CUDA_CPU_RUN(kernel, argv) \
    if (!strcmp(argv[1], #kernel)) return cpu::run_process<kernel>(argv[2]);
