// A step of collectives inside an island: every rank fills its slot, and reads the slots of the other ranks.
#include "collectives/collectives.h"

namespace sparkhvd {

Task pass_through_slots(Context& context, Passage passage) {
  Communicator& communicator = context.communicator;
  if (context.team.local_size() == 1) co_return;
  const std::uint64_t first = communicator.next_chunk();
  communicator.advance_chunks(passage.chunks);
  for (std::uint64_t step = 0; step < passage.chunks + 1; ++step) {
    if (step < passage.chunks) {
      co_await slot_is_free(communicator, first + step);
      passage.fill(step, communicator.own_slot(first + step));
      communicator.publish(Stage::kCopiedIn, first + step + 1);
    }
    if (step == 0) continue;
    const std::uint64_t number = first + step - 1;
    co_await communicator.reached(context.team, Stage::kCopiedIn, number + 1);
    passage.take(step - 1, number);
    communicator.publish(Stage::kReduced, number + 1);
    communicator.publish(Stage::kCopiedOut, number + 1);
  }
}

}  // namespace sparkhvd
