"""The parts of `sparkhvd.rendezvous`, each importing only those above it.

connections  what a meeting returns, and the protocol of whoever makes one
endpoints    where a rank listens, and what it must know to meet the others
listener     the listening sockets of a rank
loop         the event loop, and what a task may do with a socket
handshake    hellos, proofs and notices: everything that is said before a peer is believed
memory       the proof that two processes can map the same memory
blame        what a rank raises when the others do not come, and what it tells them
in_process   ranks that are threads of one process
"""
