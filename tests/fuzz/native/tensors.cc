// Tensors of requests: any bytes are read or refused, and samples in tensors are those that they are as JSON.
//
// Input: a byte that chooses schema and labels; then tensors: a byte for the field that one is of, one for how it is
// sent, two for its size, its bytes.
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "decoding.h"
#include "tensor_samples.h"

namespace streamtrain::fuzz {
namespace {

constexpr size_t kMostTensors = 8, kMostSamples = 64, kMostValues = 4096;

const std::string kFields[] = {"user", "item", "genres", "price", "age", "ts", "label", "a", "b", "", "qu\"ote",
                               std::string("nul\0", 4), "genres.length", "a.length"};

Tensor read(const std::string& name, uint8_t way, std::string_view data) {
  static constexpr std::string_view kTypes[] = {"BYTES", "INT8", "INT64", "UINT64", "FP16", "FP32", "FP64", "BOOL", "FP8"};
  if (way == 0) return read_tensorflow_tensor(name, data);
  if (way == 1) return read_inference_tensor(data, {});
  const size_t head = std::min<size_t>(data.size(), way == 2 ? 16 : 1);
  if (way == 2) return read_inference_tensor(data.substr(0, head), data.substr(head));
  const auto rows = static_cast<int64_t>(head ? data[0] : 0);
  return read_binary_tensor(name, {rows}, kTypes[way % std::size(kTypes)], data.substr(head));
}

void check(const Tensor& tensor) {
  size_t values = 1;
  for (const int64_t extent : tensor.shape) values *= static_cast<size_t>(extent);
  CHECK(!tensor.shape.empty() && tensor.size == values && values <= kMaxTensorValues);
  CHECK(tensor.stored() == values || (0 < tensor.stored() && tensor.stored() < values));
  for (const std::string_view text : tensor.texts) CHECK(!find_bad_utf8(text.data(), text.data() + text.size()));
}

void run(Input input) {
  const auto choice = input.take<uint8_t>();
  const bool with_labels = choice & 0x80;
  std::vector<std::vector<char>> kept;
  std::vector<Tensor> tensors;
  kept.reserve(kMostTensors);
  while (kept.size() < kMostTensors && !input.done()) {
    const std::string& name = kFields[input.below(std::size(kFields))];
    const auto way = input.take<uint8_t>();
    std::vector<char>& data = kept.emplace_back(std::min<size_t>(input.take<uint16_t>(), input.left()));
    for (char& byte : data) byte = input.take<char>();
    try {
      tensors.push_back(read(name, way, {data.data(), data.size()}));
      check(tensors.back());
      tensors.back().name = name;  // of one that says its name itself, too
    } catch (const std::invalid_argument&) {
    } catch (const std::overflow_error&) {
    }
  }
  TensorSamples samples;
  for (const Tensor& tensor : tensors) {
    const Tensor* lengths = nullptr;
    bool is_new = true;
    for (const Tensor& other : tensors) {
      if (other.name == tensor.name + ".length") lengths = &other;
      if (&other == &tensor) break;
      is_new &= other.name != tensor.name;
    }
    try {
      if (is_new) samples.add(tensor, choice & 0x40, lengths);
    } catch (const std::invalid_argument&) {
    } catch (const std::overflow_error&) {
    }
  }
  if (samples.size() > kMostSamples || samples.width() > kMostValues) return;
  std::vector<std::string> texts;
  for (size_t i = 0; i < samples.size(); ++i) texts.push_back(samples.json(i));
  DecoderSpec spec = spec_of(choice % kSpecs);
  spec.max_message_bytes = 1 << 20;  // tensors have no message
  Decoder decoder(spec);
  const std::vector<Source> given = {{"x"}, {{}, &samples}};
  std::vector<Source> as_json = {{"x"}};
  for (const std::string& text : texts) as_json.push_back({text});
  check_same(decoder.decode(given, with_labels), decoder.decode(as_json, with_labels), false);
}

}  // namespace
}  // namespace streamtrain::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size) streamtrain::fuzz::run({data, size});
  return 0;
}
