#include "short_division.cuh"

// Items of work: a run of channels of some of the sequences, runs fastest. No run spans two groups.
struct Runs {
  uint32_t of_group, all, channels;  // runs of a group, of all groups, and channels of a group
};

// `kUsual`: there is one group, and heads and the item are below kShort: no number is divided as an integer.
template <bool kUsual>
__device__ __forceinline__ Runs find_runs(const ScanArgs& a, int channels) {
  const uint32_t of_group = kUsual ? a.heads : static_cast<uint32_t>(a.heads) / static_cast<uint32_t>(a.groups);
  const uint32_t runs = (of_group + channels - 1) / channels;
  return {runs, kUsual ? runs : runs * a.groups, of_group};
}

__device__ __forceinline__ int64_t channel_items(const ScanArgs& a, const Runs& runs, int sequences) {
  return (entries_of(a) + sequences - 1) / sequences * runs.all;
}

template <bool kUsual>
__device__ __forceinline__ ChannelRun find_channels(const ScanArgs& a, const Runs& runs, int64_t item, int channels) {
  uint32_t entry;
  if (!kUsual) {
    entry = static_cast<uint32_t>(item / runs.all);
  } else if ((runs.all & (runs.all - 1)) == 0) {
    entry = static_cast<uint32_t>(item) >> (31 - __clz(runs.all));  // the usual number
  } else {
    entry = divide_short(static_cast<uint32_t>(item), runs.all);
  }
  const uint32_t run = static_cast<uint32_t>(item - static_cast<int64_t>(entry) * runs.all);
  const uint32_t group = kUsual ? 0 : run / runs.of_group;
  const uint32_t in_group = (run - group * runs.of_group) * channels;
  ChannelRun w;
  w.entry = entry;
  w.step = 0;
  w.group = static_cast<int>(group);
  w.first = static_cast<int>(group * runs.channels + in_group);
  w.valid = min(channels, static_cast<int>(runs.channels - in_group));
  return w;
}
