// The argument of every kernel here: as large as the project's ScanArgs, with fields of its own.
struct ScanArgs {
  const float* x;
  float* y;
  unsigned* flags;
  float* workspace;
  long stride;
  int n;
  int pad[61];
};
static_assert(sizeof(ScanArgs) == 288);
