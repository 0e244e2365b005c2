// Why a message is left out of the columns. The names are public (dead letters and metrics carry them) and documented
// in docs/samples.md; a test keeps the two in step. A name, once released, keeps its meaning.
//
// Thread safety: constants.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace streamtrain {

enum class Reason : uint8_t {
  kNone,  // not refused
  // The message as a whole. The first of these in the order of its bytes stands.
  kTooLarge,
  kNotUtf8,
  kNotJson,
  kBadEscape,
  kTooDeep,
  kNotAnObject,
  // The value of one field. The first of these in the order of the schema stands.
  kNotFinite,
  kMissingField,
  kWrongType,
  kBadTime,
  kBadLabel,
  kBadWeight,
  kIdTooLong,
  kCrossTooLarge,
  kTooManyIds,
};

inline constexpr std::array<std::string_view, 16> kReasonNames = {
    "",           "too_large",     "not_utf8",   "not_json", "bad_escape", "too_deep",   "not_an_object",  "not_finite",
    "missing_field", "wrong_type", "bad_time", "bad_label",  "bad_weight", "id_too_long", "cross_too_large",
    "too_many_ids"};

static_assert(kReasonNames.size() == static_cast<size_t>(Reason::kTooManyIds) + 1);

inline std::string_view reason_name(Reason reason) { return kReasonNames[static_cast<size_t>(reason)]; }

}  // namespace streamtrain
