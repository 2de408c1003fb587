// Which (sequence entry, run of channels) a block works on. Mamba-1: head_dim is 1, a head is a channel. A run lies
// within one group, so that all its channels share B and C.
struct ChannelRun {
  int64_t entry;
  int group;
  int first;  // first channel
  int valid;  // channels from `first` on that are there
};

__device__ __forceinline__ uint32_t runs_of_group(const ScanArgs& a, int channels) {
  const uint32_t of_group = static_cast<uint32_t>(a.heads) / static_cast<uint32_t>(a.groups);
  return (of_group + channels - 1) / channels;
}

__device__ __forceinline__ int64_t channel_items(const ScanArgs& a, int channels) {
  return entries_of(a) * a.groups * runs_of_group(a, channels);
}

__device__ __forceinline__ ChannelRun find_channels(const ScanArgs& a, int64_t item, int channels) {
  const uint32_t of_group = static_cast<uint32_t>(a.heads) / static_cast<uint32_t>(a.groups);
  const uint32_t runs = (of_group + channels - 1) / channels;
  const uint32_t of_entry = runs * a.groups;
  ChannelRun w;
  uint32_t run;
  if (item <= 0xffffffffll) {  // 64-bit division is many times slower
    const uint32_t entry = static_cast<uint32_t>(item) / of_entry;
    w.entry = entry;
    run = static_cast<uint32_t>(item) - entry * of_entry;
  } else {
    w.entry = item / of_entry;
    run = static_cast<uint32_t>(item - w.entry * of_entry);
  }
  w.group = a.groups == 1 ? 0 : static_cast<int>(run / runs);
  const int in_group = static_cast<int>(run - w.group * runs) * channels;
  w.first = w.group * static_cast<int>(of_group) + in_group;
  w.valid = min(channels, static_cast<int>(of_group) - in_group);
  return w;
}

// Zeros in y: the rows of a padding sequence, and this entry's share of the tokens that belong to no sequence.
__device__ __forceinline__ void clear_channels(const ScanArgs& a, const ChannelRun& w, int64_t begin, int64_t end,
                                               int64_t step) {
  Io* y = static_cast<Io*>(a.y) + w.first;
  for (int64_t t = begin; t < end; t += step) {
    for (int c = threadIdx.x; c < w.valid; c += blockDim.x) y[t * a.y_stride + c] = from_f32<Io>(0.f);
  }
}
