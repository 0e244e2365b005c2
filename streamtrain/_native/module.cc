// The extension module streamtrain._core. Each part of the core has one binding file, bind_<part>.cc.
#include "bind.h"

NB_MODULE(_core, m) {
#if defined(__AVX2__) && defined(__x86_64__)
  // Whoever has both has the 16-bit floats (F16C) too, whose name older Clangs do not know here.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
    throw nanobind::import_error("streamtrain was built for CPUs with AVX2; build it here with STREAMTRAIN_ARCH=native");
#endif
#if defined(NDEBUG)
  // A process that ends by an error still holds what the error's traceback refers to: no leak, and no news for its user.
  nanobind::set_leak_warnings(false);
#endif
  m.doc() = "Native core of streamtrain: hash, decoder, plan, embedding table, row optimizers, commands of Redis.";
  streamtrain::bind_commands(m);
  streamtrain::bind_decode(m);
  streamtrain::bind_dense(m);
  streamtrain::bind_hash(m);
  streamtrain::bind_lane(m);
  streamtrain::bind_merge(m);
  streamtrain::bind_plan(m);
  streamtrain::bind_table(m);
  streamtrain::bind_wire(m);
}
