#include <cerrno>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>

#include "bind.h"
#include "lane.h"

namespace streamtrain {
namespace {

constexpr double kForEver = std::numeric_limits<double>::infinity();
constexpr size_t kQuick = 256 * 1024;  // bytes whose copying is not worth letting other threads run meanwhile

// What the operating system refuses is an OSError.
template <typename Make>
Lane made(Make make) {
  try {
    return make();
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

Lane take(int fd, nb::bytes nonce) {
  Lane::Nonce given;
  if (nonce.size() != given.size()) throw std::invalid_argument("a nonce has 16 bytes");
  std::memcpy(given.data(), nonce.c_str(), given.size());
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) throw std::invalid_argument("there is no such file");
  return made([&] { return Lane::take(own, given); });
}

nb::bytes nonce(const Lane& lane) { return nb::bytes(lane.nonce().data(), lane.nonce().size()); }

// How long to wait, with the interpreter's lock let go; signals are looked for now and then, as Python's own waiting does.
Lane::Patience patience_of(double seconds) {
  return {seconds, [] {
            nb::gil_scoped_acquire acquire;
            return PyErr_CheckSignals() == 0;
          }};
}

// Whether it is done; false: the lane is closed.
bool done(Lane::Result result, double seconds) {
  if (result == Lane::Result::kStopped) throw nb::python_error();  // that of the signal's handler
  if (result == Lane::Result::kLate) {
    PyErr_Format(PyExc_TimeoutError, "the other side of a lane has neither read nor written anything for %s seconds",
                 nb::str(nb::float_(seconds)).c_str());
    throw nb::python_error();
  }
  return result == Lane::Result::kDone;
}

bool write(Lane& lane, nb::bytes data, double seconds) {
  const char* from = data.c_str();
  const size_t size = data.size();
  const Lane::Patience patience = patience_of(seconds);
  Lane::Result result;
  {
    nb::gil_scoped_release release;
    result = lane.write(from, size, patience);
  }
  return done(result, seconds);
}

bool try_write(Lane& lane, nb::bytes data) { return lane.try_write(data.c_str(), data.size()); }

// The reading of one thread: parts of messages would go to different ones.
class Turn {
 public:
  explicit Turn(Lane& lane) : lane_(lane) {
    if (!lane.enter()) throw std::runtime_error("another thread is reading from this lane; only one may");
  }
  ~Turn() { lane_.leave(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Lane& lane_;
};

nb::object read(Lane& lane, size_t limit, double seconds) {
  const Turn turn(lane);
  const Lane::Patience patience = patience_of(seconds);
  uint64_t size = 0;
  Lane::Result result;
  {
    nb::gil_scoped_release release;
    result = lane.begin(size, limit, patience);
  }
  if (!done(result, seconds)) return nb::none();
  nb::object data = nb::steal(PyBytes_FromStringAndSize(nullptr, Py_ssize_t(size)));
  if (!data.is_valid()) {
    lane.close();  // what follows would be taken for the next message
    throw nb::python_error();
  }
  char* to = PyBytes_AsString(data.ptr());
  if (size <= kQuick && lane.ready() >= size) {
    lane.finish(to, size, patience);
    return data;
  }
  {
    nb::gil_scoped_release release;
    result = lane.finish(to, size, patience);
  }
  return done(result, seconds) ? data : nb::none();
}

}  // namespace

void bind_lane(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Lane>(m, "Lane")
      .def_static("make", [] { return made(&Lane::make); })
      .def_static("take", &take, "fd"_a, "nonce"_a)
      .def_prop_ro("fd", &Lane::fd)
      .def_prop_ro("nonce", &nonce)
      .def("write", &write, "data"_a, "seconds"_a = kForEver)
      .def("try_write", &try_write, "data"_a)
      .def("read", &read, "limit"_a, "seconds"_a = kForEver)
      .def("close", &Lane::close);
}

}  // namespace streamtrain
