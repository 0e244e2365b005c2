#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

#include "bind.h"
#include "lane.h"

namespace streamtrain {
namespace {

constexpr int kLook = 1000;            // milliseconds between two looks for signals
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

bool write(Lane& lane, nb::bytes data) {
  const char* from = data.c_str();
  const size_t size = data.size();
  nb::gil_scoped_release release;
  return lane.write(from, size);
}

// Waits with the interpreter's lock let go, and looks for signals now and then, as Python's own waiting does.
bool begun(Lane& lane, uint64_t& size) {
  while (true) {
    Lane::Heard heard;
    {
      nb::gil_scoped_release release;
      heard = lane.begin(size, kLook);
    }
    if (heard != Lane::Heard::kNothing) return heard == Lane::Heard::kMessage;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

nb::object read(Lane& lane, size_t limit) {
  uint64_t size = 0;
  if (!begun(lane, size)) return nb::none();
  if (size > limit)
    throw std::invalid_argument("a message of " + std::to_string(size) + " bytes; at most " + std::to_string(limit));
  nb::object data = nb::steal(PyBytes_FromStringAndSize(nullptr, Py_ssize_t(size)));
  if (!data.is_valid()) throw nb::python_error();
  char* to = PyBytes_AS_STRING(data.ptr());
  if (size <= kQuick && lane.ready() >= size) {
    lane.finish(to, size);
    return data;
  }
  bool is_whole;
  {
    nb::gil_scoped_release release;
    is_whole = lane.finish(to, size);
  }
  return is_whole ? data : nb::none();
}

}  // namespace

void bind_lane(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Lane>(m, "Lane")
      .def_static("make", [] { return made(&Lane::make); })
      .def_static("take", &take, "fd"_a, "nonce"_a)
      .def_prop_ro("fd", &Lane::fd)
      .def_prop_ro("nonce", &nonce)
      .def("write", &write, "data"_a)
      .def("read", &read, "limit"_a)
      .def("close", &Lane::close);
}

}  // namespace streamtrain
