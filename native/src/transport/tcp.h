// Options of TCP between hosts.
#pragma once

namespace sparkhvd {

/// For connections of the engine: bytes leave at once, and a host that is gone is noticed after
/// `host_loss_s`. Nothing happens to other sockets; errors are ignored, because the connection works without.
void tune_tcp(int fd, double host_loss_s);

}  // namespace sparkhvd
