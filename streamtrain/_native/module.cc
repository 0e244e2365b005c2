// The extension module streamtrain._core. Each part of the core has one binding file, bind_<part>.cc.
//
// STREAMTRAIN_MODULE is _core, or another name where bind_arch.cc has PyInit__core.
#include "bind.h"

NB_MODULE(STREAMTRAIN_MODULE, m) {
#if defined(NDEBUG)
  // A process that ends by an error still holds what the error's traceback refers to: no leak, and no news for its user.
  nanobind::set_leak_warnings(false);
#endif
  m.doc() = "Native core of streamtrain: hash, decoder, plan, embedding table, row optimizers, commands of Redis.";
  m.attr("ARCH") = STREAMTRAIN_TARGET;
  streamtrain::bind_commands(m);
  streamtrain::bind_decode(m);
  streamtrain::bind_dense(m);
  streamtrain::bind_hash(m);
  streamtrain::bind_lane(m);
  streamtrain::bind_merge(m);
  streamtrain::bind_plan(m);
  streamtrain::bind_table(m);
  streamtrain::bind_tensor(m);
  streamtrain::bind_wire(m);
}
