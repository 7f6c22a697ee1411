// CRC-32: known values, the CPU's instructions compared with the tables, and bytes that are cut at any place.
#include "crc32.h"

#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "test.h"

namespace sparkhvd::test::crc32_test {
namespace {

using Bytes = std::vector<std::byte>;

Bytes random_bytes(std::size_t size) {
  std::mt19937 random(7);
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

std::uint32_t of_text(std::string_view text) {
  return crc32(0, std::as_bytes(std::span(text.data(), text.size())));
}

TEST(crc32_has_the_published_values) {
  CHECK_EQUAL(of_text(""), 0U);
  CHECK_EQUAL(of_text("123456789"), 0xCBF43926U);
  CHECK_EQUAL(of_text("The quick brown fox jumps over the lazy dog"), 0x414FA339U);
  const Bytes zeros(1 << 10);
  CHECK_EQUAL(crc32(0, zeros), 0xEFB5AF2EU);
}

TEST(crc32_of_the_cpu_is_that_of_the_tables) {
  const Bytes bytes = random_bytes(2100);
  for (const crc32_detail::Update hardware : crc32_detail::hardware_updates()) {
    for (std::size_t begin = 0; begin < 17; ++begin) {
      for (std::size_t size = 0; size + begin <= bytes.size(); size += size < 1100 ? 1 : 37) {
        const std::byte* const data = bytes.data() + begin;
        CHECK_EQUAL(hardware(0x12345678U, data, size),
                    crc32_detail::update_portable(0x12345678U, data, size));
      }
    }
  }
}

TEST(crc32_goes_on_from_what_came_before) {
  const Bytes bytes = random_bytes(5000);
  const std::span<const std::byte> all(bytes);
  const std::uint32_t whole = crc32(0, all);
  for (const std::size_t cut : {0, 1, 63, 64, 127, 128, 129, 4095, 4999, 5000}) {
    CHECK_EQUAL(crc32(crc32(0, all.first(cut)), all.subspan(cut)), whole);
  }
}

}  // namespace
}  // namespace sparkhvd::test::crc32_test
