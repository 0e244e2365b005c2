// Which build of the core is loaded on x86-64.
//
// The core is built twice, from the same sources and with the same results. The module that Python finds is the one for
// x86-64-v2 (SSE4.2), and contains this file. Where the processor has x86-64-v3 (AVX2, from about 2013), it hands over to
// x86-64-v3/_core….so beside it, which updates and converts rows faster. Without that file it serves itself.
// STREAMTRAIN_ARCH in the environment names one of the two, for tests.
#include <Python.h>
#include <cpuid.h>
#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

extern "C" PyObject* PyInit__baseline();

namespace {

constexpr char kBaseline[] = "x86-64-v2", kFaster[] = "x86-64-v3";

// Whether processor and operating system have x86-64-v3, beyond x86-64-v2. By cpuid itself: __builtin_cpu_supports needs
// a run-time library that not all compilers have.
bool has_faster() {
  const auto all = [](unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; };
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !all(c, bit_FMA | bit_MOVBE | bit_OSXSAVE | bit_AVX | bit_F16C)) return false;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if (!all(low, 0b110)) return false;  // 128 and 256 bits of registers are saved
  constexpr unsigned kLzcnt = 1u << 5;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && all(b, bit_AVX2 | bit_BMI | bit_BMI2) &&
         __get_cpuid(0x80000001, &a, &b, &c, &d) && all(c, kLzcnt);
}

PyObject* refuse(const std::string& why) {
  PyErr_SetString(PyExc_ImportError, why.c_str());
  return nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__core() {
  const char* const given = std::getenv("STREAMTRAIN_ARCH");
  const std::string wanted = given ? given : has_faster() ? kFaster : kBaseline;
  if (wanted == kBaseline) return PyInit__baseline();
  if (wanted != kFaster)
    return refuse("STREAMTRAIN_ARCH is " + wanted + ", but must be " + kBaseline + " or " + kFaster);
  if (!has_faster()) return refuse("STREAMTRAIN_ARCH is x86-64-v3, but this CPU has no AVX2; unset it");

  Dl_info own;
  if (!dladdr(reinterpret_cast<void*>(&PyInit__baseline), &own)) return refuse("cannot find the file of the native core");
  const std::filesystem::path here(own.dli_fname), file = here.parent_path() / kFaster / here.filename();
  std::error_code missing;
  if (!std::filesystem::exists(file, missing)) return PyInit__baseline();
  void* const core = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!core) return refuse(dlerror());
  const auto init = reinterpret_cast<PyObject* (*)()>(dlsym(core, "PyInit__core"));
  return init ? init() : refuse(dlerror());
}
