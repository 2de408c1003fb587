// v[index], by halves: with an index that differs from lane to lane the array must not leave its registers.
template <typename T, int kCount>
__device__ __forceinline__ T pick(const T (&v)[kCount], int index) {
  T left[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) left[i] = v[i];
#pragma unroll
  for (int half = kCount / 2; half >= 1; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) left[i] = index & half ? left[i + half] : left[i];
  }
  return left[0];
}

// x of neighbouring rows of one head as it is stored, four bytes a word.
using IoBits = typename BitsOf<sizeof(Io)>::type;

template <int kCount>
struct Run {
  static constexpr int kWords = (kCount * static_cast<int>(sizeof(Io)) + 3) / 4;
  uint32_t w[kWords];
  __device__ __forceinline__ Io at(int r) const {
    return element_of(pick(w, r * static_cast<int>(sizeof(Io)) / 4) >> (r * 8 * sizeof(Io) % 32), Io());
  }
};

// Rows [first, first + kCount), in as few accesses as their alignment allows, which is that of the first element of a
// run of rows. Rows from valid_rows on become 0; whole accesses are valid or not.
template <int kCount>
__device__ __forceinline__ void load_run(Run<kCount>& to, const Io* rows, int first, int valid_rows) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(Io));
  constexpr int kAccess = kBytes < 16 ? kBytes : 16;
#pragma unroll
  for (int i = 0; i < kBytes; i += kAccess) {
    const int row = first + i / static_cast<int>(sizeof(Io));
    const bool valid = row < valid_rows;
    uint32_t* words = to.w + i / 4;
    if constexpr (kAccess == 16) {
      const uint4 v = valid ? *reinterpret_cast<const uint4*>(rows + row) : make_uint4(0u, 0u, 0u, 0u);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else if constexpr (kAccess == 8) {
      const uint2 v = valid ? *reinterpret_cast<const uint2*>(rows + row) : make_uint2(0u, 0u);
      words[0] = v.x, words[1] = v.y;
    } else {
      words[0] = valid ? *reinterpret_cast<const typename BitsOf<kAccess>::type*>(rows + row) : 0u;
    }
  }
}

// The same element by element, for rows at any place.
template <int kCount>
__device__ __forceinline__ void load_run_elements(Run<kCount>& to, const Io* rows, int first, int valid_rows) {
  constexpr int kPerWord = 4 / sizeof(Io);
#pragma unroll
  for (int i = 0; i < Run<kCount>::kWords; ++i) {
    uint32_t word = 0u;
#pragma unroll
    for (int k = 0; k < kPerWord; ++k) {
      const int row = i * kPerWord + k;
      if (row < kCount && first + row < valid_rows) {
        word |= static_cast<uint32_t>(reinterpret_cast<const IoBits*>(rows)[first + row]) << (k * 8 * sizeof(Io));
      }
    }
    to.w[i] = word;
  }
}
