// What kernels of warpgroups need beyond runtime.h: barriers with phases, copies by tensor maps, products of warpgroups.
//
// Products happen when they are waited for, copies of boxes when somebody waits for their barrier: what is read or written too early
// or too late shows. Addresses of shared memory count from its start, which is aligned as the hardware's swizzle wants it.
#pragma once
#include <map>

#define __grid_constant__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define blockDim (Index{int(machine::threads.size())})
#define gridDim (Index{machine::blocks_count})

struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };

namespace machine {

inline int blocks_count;

struct Barrier {
  int arrivals = 0, left = 0;
  long bytes = 0, phase = 0;
  std::vector<std::function<void()>> copies;

  void settle() {
    if (left == 0 && bytes == 0) left = arrivals, phase++;
    progress++;
  }
};
inline std::map<uint32_t, Barrier> barriers;
inline std::map<int, Meeting> named;

inline Barrier& barrier_at(uint32_t at) {
  const auto found = barriers.find(at);
  if (found == barriers.end()) std::fprintf(stderr, "no barrier at %u\n", at), std::abort();
  return found->second;
}
inline void arrive(uint32_t at, int bytes = 0) {
  Barrier& barrier = barrier_at(at);
  barrier.bytes += bytes;
  if (--barrier.left < 0) std::fprintf(stderr, "too many arrivals at %u\n", at), std::abort();
  barrier.settle();
}

// Of a tensor map, what the launcher writes in its words.
struct Map {
  const char* data;
  int64_t sizes[4], pitches[4];  // dim, token, head, request; bytes
  int64_t columns, rows;         // of a box
};

inline void copy_box(uint32_t to, const void* words, uint32_t at, int dim, int token, int head, int request) {
  Map map;
  std::memcpy(&map, words, sizeof map);
  barrier_at(at).copies.push_back([=] {
    for (int64_t row = 0; row < map.rows; row++)
      for (int64_t column = 0; column < map.columns; column++) {
        const int64_t place[] = {dim + column, token + row, head, request};
        bool inside = true;
        int64_t offset = 0;
        for (int axis = 0; axis < 4; axis++) {
          inside = inside && place[axis] >= 0 && place[axis] < map.sizes[axis];
          offset += place[axis] * map.pitches[axis];
        }
        const uint32_t logical = to + row * 128 + column * 2;
        uint16_t unit = 0;
        if (inside) std::memcpy(&unit, map.data + offset, 2);
        std::memcpy(shared + (logical ^ (logical >> 3 & 0x70)), &unit, 2);
      }
    Barrier& barrier = barrier_at(at);
    barrier.bytes -= map.rows * map.columns * 2;
    barrier.settle();
  });
}

inline void wait_for(uint32_t at, uint32_t parity) {
  while ((barrier_at(at).phase & 1) == parity) {
    auto copies = std::move(barrier_at(at).copies);
    barrier_at(at).copies.clear();
    for (auto& copy : copies) copy();
    if (copies.empty()) pause();
  }
  progress++;
}

// An element of an operand: row of the tile (of a left one; column of a right one) and place on the common axis.
template <typename T>
double operand(uint64_t descriptor, bool across, int row, int k) {
  const uint32_t start = uint32_t(descriptor & 0x3fff) << 4, pitch = uint32_t(descriptor >> 16 & 0x3fff) << 4;
  const uint32_t logical = across ? start + row / 64 * pitch + k / 8 * 1024 + k % 8 * 128 + row % 64 * 2
                                  : start + row / 8 * 1024 + row % 8 * 128 + k * 2;
  uint16_t unit;
  std::memcpy(&unit, shared + (logical ^ (logical >> 3 & 0x70)), 2);
  return T::load(unit);
}

inline std::map<int, std::vector<std::function<void()>>> open_products;
inline std::map<int, std::deque<std::vector<std::function<void()>>>> product_groups;

inline const bool clears = [] {
  before_block = [] { barriers.clear(), named.clear(), open_products.clear(), product_groups.clear(); };
  return true;
}();

template <typename T, int N>
void add_product(float (&sums)[N], bool adds, const double (&left)[2][16], uint64_t b, bool b_across) {
  const int j = lane() % 4;
  for (int block = 0; block < N / 4; block++)
    for (int e = 0; e < 2; e++) {
      const int column = 8 * block + 2 * j + e;
      double right[16];
      for (int k = 0; k < 16; k++) right[k] = operand<T>(b, b_across, column, k);
      for (int half = 0; half < 2; half++) {
        double sum = 0.0;
        for (int k = 0; k < 16; k++) sum += left[half][k] * right[k];
        float& entry = sums[4 * block + 2 * half + e];
        entry = float((adds ? double(entry) : 0.0) + sum);
      }
    }
}

// Left operand in shared memory.
template <typename T, int N>
void multiply(bool adds, bool a_across, bool b_across, float (&sums)[N], uint64_t a, uint64_t b) {
  open_products[current->number].push_back([=, &sums] {
    const int row = current->number % 128 / 32 * 16 + lane() / 4;
    double left[2][16];
    for (int half = 0; half < 2; half++)
      for (int k = 0; k < 16; k++) left[half][k] = operand<T>(a, a_across, row + 8 * half, k);
    add_product<T>(sums, adds, left, b, b_across);
  });
}

// Left operand in registers.
template <typename T, int N>
void multiply(bool adds, bool b_across, float (&sums)[N], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
  open_products[current->number].push_back([=, &sums] {
    auto words = meet_warp({a0, a1, a2, a3});
    double left[2][16];
    for (int half = 0; half < 2; half++)
      for (int x = 0; x < 4; x++)
        for (int part = 0; part < 2; part++) {
          const uint32_t pair = uint32_t(words[lane() / 4 * 4 + x][half + 2 * part]);
          left[half][8 * part + 2 * x] = low<T>(pair), left[half][8 * part + 2 * x + 1] = high<T>(pair);
        }
    add_product<T>(sums, adds, left, b, b_across);
  });
}

inline void run_products(size_t pending) {
  auto& groups = product_groups[current->number];
  while (groups.size() > pending) {
    auto group = std::move(groups.front());
    groups.pop_front();
    for (auto& product : group) product();
  }
}

inline void store_matrices(bool transposed, uint32_t to, std::initializer_list<uint32_t> registers) {
  auto at = meet_warp({to});
  const int i = lane() / 4, j = lane() % 4;
  int matrix = 0;
  for (const uint32_t pair : registers) {
    for (int e = 0; e < 2; e++) {
      const int row = transposed ? 2 * j + e : i, column = transposed ? i : 2 * j + e;
      const uint16_t unit = uint16_t(pair >> 16 * e);
      std::memcpy(shared + uint32_t(at[8 * matrix + row][0]) + column * 2, &unit, 2);
    }
    matrix++;
  }
  meet_warp({});
}

}  // namespace machine

[[noreturn]] inline void __trap() { std::fprintf(stderr, "trap\n"), std::abort(); }
inline float __fdividef(float x, float y) { return x / y; }
inline int atomicAdd(int* at, int x) { const int before = *at; *at += x; return before; }

inline void ptx_mbarrier_init_shared__cta_b64(uint32_t at, uint32_t arrivals) {
  machine::barriers[at] = machine::Barrier();
  machine::barriers[at].arrivals = machine::barriers[at].left = int(arrivals);
}
inline void ptx_mbarrier_arrive_shared__cta_b64(uint32_t at) { machine::arrive(at); }
inline void ptx_mbarrier_arrive_expect_tx_shared__cta_b64(uint32_t at, uint32_t bytes) { machine::arrive(at, int(bytes)); }
inline void ptx_arrive_as_warp(uint32_t at, uint32_t lane) { if (lane == 0) machine::arrive(at); }
inline void ptx_wait_for(uint32_t at, uint32_t parity) { machine::wait_for(at, parity); }
inline void ptx_bar_sync(int id, int count) {
  machine::Meeting& meeting = machine::named[id];
  meeting.members = count;
  machine::meet(meeting, {});
}
inline void ptx_bar_arrive(int id, int count) {
  machine::Meeting& meeting = machine::named[id];
  if (++meeting.arrived == count) meeting.arrived = 0, meeting.generation++;
  machine::progress++;
}
template <typename... A> void ptx_nothing(A&&...) {}
inline void ptx_cp_async_bulk_tensor(uint32_t to, const void* map, uint32_t at, int dim, int token, int head, int request, uint64_t = 0) {
  machine::copy_box(to, map, at, dim, token, head, request);
}
inline void ptx_cp_async_cg_shared_global(uint32_t to, const void* from, int read) { ptx_cp_async_ca_shared_global(to, from, 16, read); }
inline void ptx_cp_async_wait_all() {
  ptx_cp_async_commit_group();
  ptx_cp_async_wait_group(0);
}
inline void ptx_wgmma_commit_group_sync_aligned() {
  auto& open = machine::open_products[machine::current->number];
  machine::product_groups[machine::current->number].push_back(std::move(open));
  open.clear();
}
inline void ptx_wgmma_wait_group_sync_aligned(int pending) { machine::run_products(pending); }
template <typename T> void write_at(uint32_t at, T x) { std::memcpy(machine::shared + at, &x, sizeof x); }
inline void ptx_st_shared_f32(uint32_t at, float x) { write_at(at, x); }
inline void ptx_st_shared_v4_b32(uint32_t at, int x, int y, int z, int w) { write_at(at, int4{x, y, z, w}); }
inline void ptx_st_shared_v4_b32(uint32_t at, int x) { write_at(at, int4{x, x, x, x}); }
inline void ptx_st_global_v4_b32(void* to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  const uint32_t words[] = {x, y, z, w};
  std::memcpy(to, words, sizeof words);
}
inline void ptx_stmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  machine::store_matrices(false, to, {a, b, c, d});
}
inline void ptx_stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  machine::store_matrices(true, to, {a, b, c, d});
}
inline void ptx_red_global_add_v4_f32(float* to, float a, float b, float c, float d) { to[0] += a, to[1] += b, to[2] += c, to[3] += d; }
inline void ptx_unpack(float& x, float& y, uint32_t pair) {
  x = float(machine::low<machine::Fp16>(pair)), y = float(machine::high<machine::Fp16>(pair));
}
