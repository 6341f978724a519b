// What a CUDA kernel sees of its machine, on one CPU thread: the threads of a block are fibers that take turns where they meet.
//
// Instructions in PTX are functions ptx_<name>, with their operands in order. Asynchronous copies happen when they are waited for, so
// that a kernel that reads too early reads what was there before: bits of NaN at first.
#include <immintrin.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#undef INFINITY
#undef NAN
#define __device__
#define __host__
#define __global__
#define __launch_bounds__(...)

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct Index { int x; };

namespace machine {

struct Copy { unsigned to; const void* from; int bytes, read; };

// Where threads exchange 64-bit words: two sets, so that nobody writes what another still reads.
struct Meeting {
  int members = 0, arrived = 0;
  long generation = 0;
  uint64_t words[2][32][16];
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  int number = 0;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

inline ucontext_t scheduler;
inline std::vector<Thread> threads;
inline std::vector<Meeting> warps;
inline Meeting block;
inline Thread* current;
inline int block_number;
inline char* shared;
inline long progress;
inline std::function<void()> body;
inline void (*before_block)() = nullptr;

inline void pause() { swapcontext(&current->context, &scheduler); }

// Words of all members; each calls with its own.
inline uint64_t (*meet(Meeting& meeting, std::initializer_list<uint64_t> own))[16] {
  const long generation = meeting.generation;
  std::copy(own.begin(), own.end(), meeting.words[generation % 2][current->number % 32]);
  if (++meeting.arrived == meeting.members) {
    meeting.arrived = 0;
    meeting.generation++;
  }
  progress++;
  while (meeting.generation == generation) pause();
  return meeting.words[generation % 2];
}
inline uint64_t (*meet_warp(std::initializer_list<uint64_t> own))[16] { return meet(warps[current->number / 32], own); }
inline int lane() { return current->number % 32; }

inline void enter() {
  body();
  current->done = true;
  progress++;
  pause();
}

inline void run_block(int threads_count, size_t shared_bytes) {
  if (before_block) before_block();
  static std::vector<char> memory;
  memory.assign(shared_bytes + 1024, char(0xff));
  shared = memory.data() + (1024 - reinterpret_cast<uintptr_t>(memory.data()) % 1024) % 1024;
  if (threads.size() != size_t(threads_count)) {
    threads = std::vector<Thread>(threads_count);
    for (auto& thread : threads) thread.stack = std::make_unique<char[]>(256 << 10);
  }
  warps = std::vector<Meeting>(threads_count / 32);
  for (auto& warp : warps) warp.members = 32;
  block = Meeting();
  block.members = threads_count;
  for (int i = 0; i < threads_count; i++) {
    Thread& thread = threads[i];
    thread.number = i, thread.done = false;
    thread.open.clear(), thread.groups.clear();
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = 256 << 10;
    thread.context.uc_link = &scheduler;
    makecontext(&thread.context, enter, 0);
  }
  for (bool left = true; left;) {
    left = false;
    const long before = progress;
    for (auto& thread : threads) {
      if (thread.done) continue;
      left = true;
      current = &thread;
      swapcontext(&scheduler, &thread.context);
    }
    if (left && progress == before) {
      std::fprintf(stderr, "block %d: its threads wait for each other\n", block_number);
      std::abort();
    }
  }
}

template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*reinterpret_cast<std::remove_cv_t<A>*>(arguments[I])...);
}
template <typename... A>
void launch(void (*kernel)(A...), int blocks, int threads_count, size_t shared_bytes, void** arguments) {
  body = [=] { call(kernel, arguments, std::index_sequence_for<A...>()); };
  for (block_number = 0; block_number < blocks; block_number++) run_block(threads_count, shared_bytes);
}

inline float as_float(uint32_t x) { float y; std::memcpy(&y, &x, 4); return y; }
inline uint32_t as_bits(float x) { uint32_t y; std::memcpy(&y, &x, 4); return y; }

// x rounded to nearest even, with so many bits and multiples of 2 ** least.
inline double rounded(double x, int bits, int least) {
  if (!std::isfinite(x) || x == 0.0) return x;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(x) - bits + 1, least));
  return std::nearbyint(x / unit) * unit;
}
struct Bf16 {
  static double load(uint32_t bits) { return as_float(bits << 16); }
  static uint32_t store(double x) {
    if (std::isnan(x)) return 0x7fff;
    return as_bits(float(std::abs(x) >= 0x1.ffp127 ? std::copysign(HUGE_VAL, x) : rounded(x, 8, -133))) >> 16;
  }
};
struct Fp16 {
  static double load(uint32_t bits) { return _cvtsh_ss(uint16_t(bits)); }
  static uint32_t store(double x) { return _cvtss_sh(float(rounded(x, 11, -24)), 0); }
};
template <typename T> double low(uint32_t x) { return T::load(x & 0xffff); }
template <typename T> double high(uint32_t x) { return T::load(x >> 16); }
template <typename T> uint32_t pack(double x, double y) { return T::store(x) | T::store(y) << 16; }

inline double e4m3(uint32_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if ((byte & 127) == 127) return std::nan("");
  const double size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return byte & 128 ? -size : size;
}

// Rows of a are queries of lanes 4i to 4i + 3, as the PTX manual has it; sums are rounded once.
template <typename T>
void mma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
         float c0, float c1, float c2, float c3) {
  auto words = meet_warp({a0, a1, a2, a3, b0, b1});
  const int i = lane() / 4, j = lane() % 4;
  const auto entry = [&](int row, int column) {
    double sum = 0.0;
    for (int x = 0; x < 4; x++) {
      for (int half = 0; half < 2; half++) {
        const uint32_t a = uint32_t(words[row % 8 * 4 + x][row / 8 + 2 * half]), b = uint32_t(words[column * 4 + x][4 + half]);
        sum += low<T>(a) * low<T>(b) + high<T>(a) * high<T>(b);
      }
    }
    return sum;
  };
  d0 = float(c0 + entry(i, 2 * j)), d1 = float(c1 + entry(i, 2 * j + 1));
  d2 = float(c2 + entry(i + 8, 2 * j)), d3 = float(c3 + entry(i + 8, 2 * j + 1));
}

inline void load_matrices(bool transposed, uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t address) {
  auto words = meet_warp({address});
  const int i = lane() / 4, j = lane() % 4;
  uint32_t* const results[] = {&r0, &r1, &r2, &r3};
  for (int matrix = 0; matrix < 4; matrix++) {
    const auto unit = [&](int row, int column) {
      const uint32_t at = uint32_t(words[8 * matrix + row][0]);
      if (at % 16) std::fprintf(stderr, "a row of a matrix lies at %u\n", at), std::abort();
      return uint32_t(reinterpret_cast<const uint16_t*>(shared + at)[column]);
    };
    *results[matrix] = transposed ? unit(2 * j, i) | unit(2 * j + 1, i) << 16 : unit(i, 2 * j) | unit(i, 2 * j + 1) << 16;
  }
}

}  // namespace machine

#define threadIdx (Index{machine::current->number})
#define blockIdx (Index{machine::block_number})

inline int min(int x, int y) { return x < y ? x : y; }
inline int max(int x, int y) { return x < y ? y : x; }
inline long long min(long long x, long long y) { return x < y ? x : y; }
inline long long max(long long x, long long y) { return x < y ? y : x; }
inline float __uint_as_float(unsigned x) { return machine::as_float(x); }
inline float __int_as_float(int x) { return machine::as_float(unsigned(x)); }
inline unsigned __float_as_uint(float x) { return machine::as_bits(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline size_t __cvta_generic_to_shared(const void* at) { return size_t(static_cast<const char*>(at) - machine::shared); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned place = selector >> 4 * i & 15, byte = unsigned(bytes >> 8 * (place & 7)) & 255;
    result |= (place & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return result;
}
template <typename T> T exchanged(T x, int from) {
  uint64_t word = 0;
  std::memcpy(&word, &x, sizeof x);
  auto words = machine::meet_warp({word});
  std::memcpy(&x, &words[from % 32][0], sizeof x);
  return x;
}
template <typename T> T __shfl_sync(unsigned, T x, int from) { return exchanged(x, from); }
template <typename T> T __shfl_xor_sync(unsigned, T x, int distance) { return exchanged(x, machine::lane() ^ distance); }
inline bool __any_sync(unsigned, bool x) {
  auto words = machine::meet_warp({x});
  return std::any_of(words, words + 32, [](const uint64_t* own) { return own[0] != 0; });
}
inline void __syncwarp() { machine::meet_warp({}); }
inline void __syncthreads() { machine::meet(machine::block, {}); }

#define PAIRS(type, name)                                                                                                         \
  inline void ptx_fma_rn_##name(uint32_t& r, uint32_t x, uint32_t y, uint32_t z) {                                                \
    using namespace machine;                                                                                                      \
    r = pack<type>(low<type>(x) * low<type>(y) + low<type>(z), high<type>(x) * high<type>(y) + high<type>(z));                    \
  }                                                                                                                               \
  inline void ptx_mul_rn_##name(uint32_t& r, uint32_t x, uint32_t y) {                                                            \
    using namespace machine;                                                                                                      \
    r = pack<type>(low<type>(x) * low<type>(y), high<type>(x) * high<type>(y));                                                   \
  }                                                                                                                               \
  inline void ptx_add_rn_##name(uint32_t& r, uint32_t x, uint32_t y) {                                                            \
    using namespace machine;                                                                                                      \
    r = pack<type>(low<type>(x) + low<type>(y), high<type>(x) + high<type>(y));                                                   \
  }                                                                                                                               \
  inline void ptx_cvt_rn_##name##_f32(uint32_t& r, float high, float low) { r = machine::pack<type>(low, high); }
PAIRS(machine::Bf16, bf16x2)
PAIRS(machine::Fp16, f16x2)
inline void ptx_low_half(float& r, uint32_t x) { r = float(machine::low<machine::Fp16>(x)); }
inline void ptx_high_half(float& r, uint32_t x) { r = float(machine::high<machine::Fp16>(x)); }
inline void ptx_cvt_rn_f16x2_e4m3x2(uint32_t& r, uint16_t x) {
  r = machine::pack<machine::Fp16>(machine::e4m3(x & 255), machine::e4m3(x >> 8));
}
inline void ptx_cvt_f32_f16(float& r, uint16_t x) { r = float(machine::Fp16::load(x)); }
inline void ptx_cvt_rn_bf16_f32(uint16_t& r, float x) { r = uint16_t(machine::Bf16::store(x)); }
inline void ptx_cvt_rn_f16_f32(uint16_t& r, float x) { r = uint16_t(machine::Fp16::store(x)); }
inline void ptx_lop3_b32_0x6a(uint32_t& r, uint32_t x, uint32_t y, uint32_t z) { r = (x & y) ^ z; }
inline void ptx_ex2_approx_ftz_f32(float& r, float x) { r = exp2f(x); }
inline void ptx_tanh_approx_f32(float& r, float x) { r = tanhf(x); }
inline void ptx_movmatrix_sync_aligned_m8n8_trans_b16(uint32_t& r, uint32_t x) {
  auto words = machine::meet_warp({x});
  const int i = machine::lane() / 4, j = machine::lane() % 4;
  const auto unit = [&](int row) { return uint32_t(words[row * 4 + i / 2][0]) >> 16 * (i % 2) & 0xffff; };
  r = unit(2 * j) | unit(2 * j + 1) << 16;
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t at) {
  machine::load_matrices(false, a, b, c, d, at);
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t at) {
  machine::load_matrices(true, a, b, c, d, at);
}
template <typename... A> void ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(A&&... a) { machine::mma<machine::Bf16>(a...); }
template <typename... A> void ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(A&&... a) { machine::mma<machine::Fp16>(a...); }
inline void ptx_cp_async_ca_shared_global(uint32_t to, const void* from, int bytes, int read) {
  if (to % bytes || (read && reinterpret_cast<uintptr_t>(from) % bytes)) std::fprintf(stderr, "a copy is not aligned\n"), std::abort();
  machine::current->open.push_back({to, from, bytes, read});
}
inline void ptx_cp_async_cg_shared_global_L2__128B(uint32_t to, const void* from, int read) {
  ptx_cp_async_ca_shared_global(to, from, 16, read);
}
inline void ptx_cp_async_commit_group() {
  machine::current->groups.push_back(std::move(machine::current->open));
  machine::current->open.clear();
}
inline void ptx_cp_async_wait_group(int left) {
  auto& groups = machine::current->groups;
  for (; groups.size() > size_t(left); groups.pop_front()) {
    for (const machine::Copy& copy : groups.front()) {
      std::memset(machine::shared + copy.to, 0, copy.bytes);
      if (copy.read) std::memcpy(machine::shared + copy.to, copy.from, copy.read);
    }
  }
}
