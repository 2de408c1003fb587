#include "short_division.cuh"

// Items of work: a run of channels of some of the sequences, runs fastest. No run spans two groups.
struct Runs {
  uint32_t of_group, all, channels;  // runs of a group, of all groups, and channels of a group
};

__device__ __forceinline__ Runs runs_from(const ScanArgs& a, int channels, uint32_t of_group) {
  const uint32_t runs = (of_group + channels - 1) / channels;
  return {runs, runs * a.groups, of_group};
}

// `kShortNumbers`: heads and the item are below kShort, which the usual ones are: no number is divided as an integer.
template <bool kShortNumbers>
__device__ __forceinline__ Runs find_runs(const ScanArgs& a, int channels) {
  const uint32_t heads = a.heads, groups = a.groups;
  if (groups == 1) return runs_from(a, channels, heads);
  return runs_from(a, channels, kShortNumbers ? divide_short(heads, groups) : heads / groups);
}

__device__ __forceinline__ int64_t channel_items(const ScanArgs& a, const Runs& runs, int sequences) {
  return (entries_of(a) + sequences - 1) / sequences * runs.all;
}

template <bool kShortNumbers>
__device__ __forceinline__ ChannelRun find_channels(const ScanArgs& a, const Runs& runs, int64_t item, int channels) {
  uint32_t entry;
  if (!kShortNumbers) {
    entry = static_cast<uint32_t>(item / runs.all);
  } else if ((runs.all & (runs.all - 1)) == 0) {
    entry = static_cast<uint32_t>(item) >> (31 - __clz(runs.all));  // the usual number
  } else {
    entry = divide_short(static_cast<uint32_t>(item), runs.all);
  }
  const uint32_t run = static_cast<uint32_t>(item - static_cast<int64_t>(entry) * runs.all);
  uint32_t group = 0;
  if (a.groups != 1) group = kShortNumbers ? divide_short(run, runs.of_group) : run / runs.of_group;
  const uint32_t in_group = (run - group * runs.of_group) * channels;
  ChannelRun w;
  w.entry = entry;
  w.step = 0;
  w.group = static_cast<int>(group);
  w.first = static_cast<int>(group * runs.channels + in_group);
  w.valid = min(channels, static_cast<int>(runs.channels - in_group));
  return w;
}
