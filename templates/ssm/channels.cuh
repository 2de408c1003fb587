// Which run of channels a block works on, and which sequences. Mamba-1: head_dim is 1, a head is a channel. A run lies
// within one group, so that all its channels share B and C. A block keeps its run and goes from sequence to sequence:
// what belongs to channels is loaded once.
struct ChannelRun {
  uint32_t entry;  // the block's first entry of the launch's list of sequences,
  uint32_t step;   // and how far apart the others are
  int group;
  int first;  // first channel
  int valid;  // channels from `first` on that are there
};

// NOTE: the grid is a multiple of the number of runs, so blocks of one run are whole runs apart.
__device__ __forceinline__ ChannelRun find_channels(const ScanArgs& a, int channels) {
  const uint32_t of_group = static_cast<uint32_t>(a.heads) / static_cast<uint32_t>(a.groups);
  const uint32_t runs_of_group = (of_group + channels - 1) / channels;
  const uint32_t runs = runs_of_group * a.groups;
  const uint32_t entry = blockIdx.x / runs, run = blockIdx.x - entry * runs;
  ChannelRun w;
  w.entry = entry;
  w.step = gridDim.x / runs;
  w.group = a.groups == 1 ? 0 : static_cast<int>(run / runs_of_group);
  const int in_group = static_cast<int>(run - w.group * runs_of_group) * channels;
  w.first = w.group * static_cast<int>(of_group) + in_group;
  w.valid = min(channels, static_cast<int>(of_group) - in_group);
  return w;
}

// Zeros in the run's channels of y, by so many threads.
__device__ __forceinline__ void clear_channels(const ScanArgs& a, const ChannelRun& w, int thread, int threads,
                                               int64_t begin, int64_t end, int64_t step) {
  Io* y = static_cast<Io*>(a.y) + w.first;
  for (int64_t t = begin; t < end; t += step) {
    for (int c = thread; c < w.valid; c += threads) y[t * a.y_stride + c] = from_f32<Io>(0.f);
  }
}
