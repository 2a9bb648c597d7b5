// What a controller's bounded wait has to be: the `Wait` that its methods take.
//
// bool ready()
//     Before arriving: may this call take part? False: not before settle() has said so.
//
// void notify(uint32_t peer)
//     After my arrival was stored at `peer`.
//
// bool until(const Semaphore& mine, uint32_t peer, uint64_t expected)
//     Poll until `peer` has arrived, then acquire from it. False: it takes too long, or something is wrong;
//     persist() decides.
//
// bool settle()
//     Is the group whole? Off the fast path.
//
// bool persist(const Semaphore& mine, uint32_t peer, uint64_t expected)
//     As until(), to the end: false means that the wait was given up.
//
// Fast and slow are apart because a kernel whose fast path has to step over the slow one fetches more
// instructions at every launch: 0.1 to 0.15 µs of 2.1 for a barrier on an H200.
#pragma once
