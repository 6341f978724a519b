// What a CUDA kernel sees of its machine, on one CPU thread.
//
// Instructions in PTX are functions ptx_<name>, with their operands in order. What a kernel reads too early is NaN.
#include "numbers.h"
#include "scheduler.h"

#undef INFINITY
#undef NAN
#define __device__
#define __host__
#define __global__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct Index { unsigned x; };

#define threadIdx (Index{unsigned(machine::current->number)})
#define blockIdx (Index{unsigned(machine::block->number)})
#define gridDim (Index{unsigned(machine::num_blocks)})

inline int min(int x, int y) { return x < y ? x : y; }
inline int max(int x, int y) { return x < y ? y : x; }
inline long long min(long long x, long long y) { return x < y ? x : y; }
inline long long max(long long x, long long y) { return x < y ? y : x; }
inline float __uint_as_float(unsigned x) { return machine::as_float(x); }
inline float __int_as_float(int x) { return machine::as_float(unsigned(x)); }
inline unsigned __float_as_uint(float x) { return machine::as_bits(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline size_t __cvta_generic_to_shared(const void* at) {
  return size_t(static_cast<const char*>(at) - machine::shared) + machine::FIRST_SHARED;
}
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
inline void __syncthreads() { machine::meet(machine::block->all, {}, "its block"); }
inline void __trap() { FAIL("block %d: a trap", machine::block->number); }
inline uint64_t __umul64hi(uint64_t x, uint64_t y) { return uint64_t((unsigned __int128)x * y >> 64); }
inline float __fdividef(float x, float y) { return x / y; }
inline int atomicAdd(int* at, int x) {
  machine::yield();
  const int before = *at;
  *at += x;
  return before;
}

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
inline void ptx_halves(float& low, float& high, uint32_t x) {
  low = float(machine::low<machine::Fp16>(x)), high = float(machine::high<machine::Fp16>(x));
}
inline void ptx_high_half(float& r, uint32_t x) { r = float(machine::high<machine::Fp16>(x)); }
inline void ptx_cvt_rn_f16x2_e4m3x2(uint32_t& r, uint16_t x) {
  r = machine::pack<machine::Fp16>(machine::e4m3(x & 255), machine::e4m3(x >> 8));
}
inline void ptx_pack_e4m3(uint32_t& r, float a, float b, float c, float d) {
  using machine::E4m3;
  r = E4m3::store(a) | E4m3::store(b) << 8 | E4m3::store(c) << 16 | E4m3::store(d) << 24;
}
inline void ptx_cvt_f32_f16(float& r, uint16_t x) { r = float(machine::Fp16::load(x)); }
inline void ptx_cvt_rn_bf16_f32(uint16_t& r, float x) { r = uint16_t(machine::Bf16::store(x)); }
inline void ptx_cvt_rn_f16_f32(uint16_t& r, float x) { r = uint16_t(machine::Fp16::store(x)); }
inline void ptx_lop3_b32_0x6a(uint32_t& r, uint32_t x, uint32_t y, uint32_t z) { r = (x & y) ^ z; }
inline void ptx_ex2_approx_ftz_f32(float& r, float x) { r = exp2f(x); }
inline void ptx_sin_approx_f32(float& r, float x) { r = sinf(x); }
inline void ptx_cos_approx_f32(float& r, float x) { r = cosf(x); }
inline void ptx_tanh_approx_f32(float& r, float x) { r = tanhf(x); }
inline void ptx_max_NaN_f32(float& r, float x, float y) { r = std::isnan(x) || std::isnan(y) ? machine::as_float(0x7fc00000u) : fmaxf(x, y); }
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
inline void ptx_stmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  machine::store_matrices(false, to, {a, b, c, d});
}
inline void ptx_stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  machine::store_matrices(true, to, {a, b, c, d});
}
inline void ptx_st_shared_u16(uint32_t to, uint16_t x) { machine::write_shared(to, x); }
inline void ptx_ld_shared_v4_b32(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t from) {
  uint32_t words[4];
  std::memcpy(words, machine::shared_at(from, 16), 16);
  a = words[0], b = words[1], c = words[2], d = words[3];
}
inline void ptx_ld_shared_u16(uint16_t& r, uint32_t from) { std::memcpy(&r, machine::shared_at(from, 2), 2); }
inline void ptx_st_shared_f32(uint32_t to, float x) { machine::write_shared(to, x); }
inline void ptx_st_shared_v2_b32(uint32_t to, unsigned a, unsigned b) { machine::write_shared(to, uint2{a, b}); }
inline void ptx_st_shared_v4_b32(uint32_t to, unsigned a, unsigned b, unsigned c, unsigned d) { machine::write_shared(to, uint4{a, b, c, d}); }
inline void ptx_st_shared_v4_b32(uint32_t to, unsigned x) { machine::write_shared(to, uint4{x, x, x, x}); }
inline void ptx_st_global_v4_b32(void* to, unsigned a, unsigned b, unsigned c, unsigned d) {
  if (reinterpret_cast<uintptr_t>(to) % 16) FAIL("16 bytes in memory are not aligned");
  *static_cast<uint4*>(to) = {a, b, c, d};
}
inline void ptx_red_global_add_v4_f32(float* to, float a, float b, float c, float d) {
  if (reinterpret_cast<uintptr_t>(to) % 16) FAIL("16 bytes in memory are not aligned");
  to[0] += a, to[1] += b, to[2] += c, to[3] += d;
}

inline void ptx_cp_async_ca_shared_global(uint32_t to, const void* from, int bytes, int read) { machine::start_copy(to, from, bytes, read); }
inline void ptx_cp_async_cg_shared_global(uint32_t to, const void* from, int read) { machine::start_copy(to, from, 16, read); }
inline void ptx_cp_async_cg_shared_global_L2__128B(uint32_t to, const void* from, int read) { machine::start_copy(to, from, 16, read); }
inline void ptx_cp_async_commit_group() {
  machine::current->copy_groups.push_back(std::move(machine::current->copies));
  machine::current->copies.clear();
}
inline void ptx_cp_async_wait_group(int left) { machine::end_copy_groups(left); }
inline void ptx_cp_async_wait_all() {
  ptx_cp_async_commit_group();
  machine::end_copy_groups(0);
}

inline void ptx_mbarrier_init_shared__cta_b64(uint32_t at, uint32_t count) {
  *reinterpret_cast<machine::Barrier*>(machine::shared_at(at, 8)) = {uint16_t(count), uint16_t(count), 0, 0};
}
inline void ptx_mbarrier_arrive_shared__cta_b64(uint32_t at) { machine::arrive(at, 0); }
inline void ptx_mbarrier_arrive_shared__cta_b64_if_0(uint32_t at, uint32_t x) {
  if (x == 0) machine::arrive(at, 0);
}
inline void ptx_mbarrier_arrive_expect_tx_shared__cta_b64(uint32_t at, uint32_t bytes) { machine::arrive(at, int(bytes)); }
inline void ptx_mbarrier_try_wait_parity_shared__cta_b64(uint32_t at, uint32_t parity) { machine::wait_for_phase(at, parity); }
inline void ptx_fence_mbarrier_init_release_cluster() { machine::publish(); }
inline void ptx_fence_proxy_async_shared__cta() { machine::publish(); }
inline void ptx_bar_sync(int id, int count) { machine::arrive_named(id, count, true); }
inline void ptx_bar_arrive(int id, int count) { machine::arrive_named(id, count, false); }
inline void ptx_setmaxnreg_dec_sync_aligned_u32() { machine::meet_warp({}); }
inline void ptx_setmaxnreg_inc_sync_aligned_u32() { machine::meet_warp({}); }
template <typename... Hint>
void ptx_cp_async_bulk_tensor_4d(uint32_t to, const void* map, uint32_t barrier, int dim, int token, int head, int request, Hint...) {
  machine::start_box(to, map, barrier, dim, token, head, request);
}

template <typename T> void ptx_nothing(T&) {}
inline void ptx_wgmma_fence_sync_aligned() { machine::current->has_begun_products = true; }
inline void ptx_wgmma_commit_group_sync_aligned() { machine::current->product_groups.push_back(machine::current->products); }
inline void ptx_wgmma_wait_group_sync_aligned(int pending) { machine::await_products(pending); }
template <int COLUMNS, typename T, bool ADDS, bool A_ACROSS, bool B_ACROSS>
void ptx_wgmma(float& sums, uint64_t a, uint64_t b) {
  machine::start_product({COLUMNS, ADDS, false, A_ACROSS, B_ACROSS, T::BYTES, T::load, a, b}, &sums, {});
}
template <int COLUMNS, typename T, bool ADDS, bool A_ACROSS, bool B_ACROSS>
void ptx_wgmma(float& sums, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
  machine::start_product({COLUMNS, ADDS, true, false, B_ACROSS, T::BYTES, T::load, 0, b}, &sums, {a0, a1, a2, a3});
}
