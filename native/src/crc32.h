// CRC-32 of zlib, gzip and Parquet: polynomial 0xEDB88320, least significant bit first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace sparkhvd {

/// Continues a CRC (0 at the start) over some bytes, with the CPU's own instructions if available.
std::uint32_t crc32(std::uint32_t crc, std::span<const std::byte> data) noexcept;

namespace crc32_detail {

/// Function type of the implementations; `state` and the result are the CRC with all bits inverted.
using Update = std::uint32_t (*)(std::uint32_t state, const std::byte* data, std::size_t size);

std::uint32_t update_portable(std::uint32_t state, const std::byte* data,
                              std::size_t size) noexcept;
/// The implementations that this CPU and this build support, the fastest last.
std::vector<Update> hardware_updates();

}  // namespace crc32_detail
}  // namespace sparkhvd
