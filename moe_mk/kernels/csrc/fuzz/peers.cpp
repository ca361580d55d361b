// Dispatch and combine of one rank whose peers store arbitrary words: counts, offsets, epochs and slots out of range, right
// at their limits or at random, before a call and while it runs. Every call must give the right rows or a status.
//
// What peers may store to is mapped twice: read-only for the rank under test, writable for its peers; each part ends at
// an inaccessible page. A store of the rank to anything but its own buffers, and a load behind a part, therefore raises a
// signal; the bytes before a part are a canary.
#include "../exchange.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace moe_mk::fuzz {
namespace {

constexpr uint8_t kCanary = 0xc5;
constexpr int kLayerAt = 24;  // a flag is epoch << 32 | layer << 24 | count
constexpr uint32_t kCountMask = (uint32_t(1) << kLayerAt) - 1;

[[noreturn]] void fail(const char* what, int seed) {
  std::printf("FAILED exchange: %s, seed %d\n", what, seed);
  std::exit(1);
}
void expect(bool holds, const char* what, int seed) {
  if (!holds) fail(what, seed);
}

struct Random {
  std::mt19937 engine;
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }
  uint32_t bits() { return uint32_t(engine()); }
  bool one_in(int n) { return pick(1, n) == 1; }
};

// Bytes that end at an inaccessible page.
class Part {
 public:
  explicit Part(size_t size) : size_(size) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    mapped_ = (size + page - 1) / page * page + (size == 0 ? page : 0);
    const int file = memfd_create("fuzz", 0);
    if (file < 0 || ftruncate(file, off_t(mapped_)) != 0) fail("no memory", -1);
    for (int writable = 0; writable < 2; ++writable) {
      void* at = mmap(nullptr, mapped_ + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (at == MAP_FAILED) fail("no memory", -1);
      const int access = writable ? PROT_READ | PROT_WRITE : PROT_READ;
      if (mmap(at, mapped_, access, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) fail("no memory", -1);
      views_[writable] = static_cast<uint8_t*>(at);
    }
    close(file);
    std::memset(views_[1], kCanary, mapped_);
    page_ = page;
  }
  Part(const Part&) = delete;
  ~Part() {
    for (uint8_t* view : views_) munmap(view, mapped_ + page_);
  }
  const uint8_t* seen() const { return views_[0] + mapped_ - size_; }  // by the rank under test
  uint8_t* stored() { return views_[1] + mapped_ - size_; }            // by peers, or by the rank where it owns the part
  size_t size() const { return size_; }
  void scramble(Random& random) {
    for (size_t i = 0; i < size_; ++i) stored()[i] = uint8_t(random.bits());
  }
  bool intact() const {
    return std::all_of(views_[0], views_[0] + mapped_ - size_, [](uint8_t byte) { return byte == kCanary; });
  }

 private:
  size_t size_, mapped_, page_;
  uint8_t* views_[2];
};

using Parts = std::vector<std::unique_ptr<Part>>;

Part& add(Parts& parts, int64_t size) { return *parts.emplace_back(std::make_unique<Part>(size_t(size))); }

struct Shape {
  int ranks, rank, rows, top_k, slots, tokens, hidden, row_type, quantize, columns, isa, threads;
  uint32_t layer;
  int64_t value_bytes, scale_bytes;
  int64_t tail_bytes() const { return scale_bytes + 8 * top_k; }
  int64_t sum_bytes() const { return int64_t(hidden) * (row_type == kRowsF32 ? 4 : 2); }
};

Shape draw_shape(Random& random) {
  Shape s = {};
  s.ranks = random.pick(2, 5);
  s.rank = random.pick(0, s.ranks - 1);
  s.rows = random.pick(1, 40);
  s.top_k = random.pick(1, 4);
  s.slots = random.pick(1, 3);
  s.tokens = random.pick(0, s.rows);
  s.hidden = random.pick(1, 40);
  s.row_type = random.pick(0, 2);
  s.quantize = std::array{kAsIs, kFp8Rows, kUe8m0Rows}[size_t(random.pick(0, 2))];
  s.columns = random.pick(1, 300);
  const int groups = (s.columns + 127) / 128;
  s.value_bytes = s.quantize == kAsIs ? random.pick(1, 200) : s.columns;
  s.scale_bytes = s.quantize == kAsIs ? random.pick(0, 9) : groups * (s.quantize == kFp8Rows ? 4 : 1);
  s.threads = random.pick(1, 3);
  s.layer = uint32_t(random.pick(0, 254));
  do s.isa = random.pick(0, kNumIsas - 1);
  while (!moe_mk_isa_supported(s.isa));
  return s;
}

// The windows of all ranks as mapped by one rank, laid out as prepare_finalize/one_sided/buffers.py does.
struct World {
  const Shape s;
  Parts parts;
  std::vector<Part*> values_at, tails_at, sums_at, tails_in, apart;  // apart: null where values are at the seam
  Part *window, *flags, *raised;
  std::vector<uint8_t*> values_to, tails_to;
  std::vector<const uint8_t*> values_from, tails_from, sums;
  std::vector<int64_t> back_to, back_from, room;
  std::vector<uint64_t*> flags_to;
  std::vector<const uint64_t*> flags_from, failed_from;
  MoeMkFault fault = {};
  MoeMkWindows windows = {};
  int left;

  explicit World(const Shape& shape) : s(shape), left(std::min(shape.rank, shape.ranks - 2)) {
    const int64_t values = int64_t(s.rows) * s.value_bytes, tails = s.rows * s.tail_bytes();
    window = &add(parts, s.ranks * values);
    flags = &add(parts, 24 * s.ranks);
    raised = &add(parts, 16 * s.ranks);
    for (int rank = 0; rank < s.ranks; ++rank) {
      const bool pair = rank == left || rank == left + 1, me = rank == s.rank;
      tails_in.push_back(&add(parts, tails));
      tails_at.push_back(me ? tails_in.back() : &add(parts, tails));
      values_at.push_back(&add(parts, values));
      sums_at.push_back(&add(parts, s.ranks * s.rows * s.sum_bytes()));
      apart.push_back(pair ? nullptr : &add(parts, values));
      values_from.push_back(pair ? window->stored() + (left + 1) * values : apart.back()->seen());
      back_from.push_back(rank == left ? s.value_bytes : 0);
      values_to.push_back(me ? window->stored() + (left + 1) * values : values_at.back()->stored());
      back_to.push_back(me ? back_from.back() : 0);
      tails_to.push_back(tails_at.back()->stored());
      tails_from.push_back(tails_in.back()->seen());
      sums.push_back(sums_at.back()->seen());
      room.push_back(s.rows);
    }
    for (int flag = 0; flag < 2 * s.ranks; ++flag) {
      const bool me = flag % s.ranks == s.rank;
      flags_to.push_back(me ? nullptr : reinterpret_cast<uint64_t*>(raised->stored()) + flag);
      flags_from.push_back(me ? nullptr : reinterpret_cast<const uint64_t*>(flags->seen()) + flag);
    }
    for (int rank = 0; rank < s.ranks; ++rank) {
      const uint64_t* failed = reinterpret_cast<const uint64_t*>(flags->seen()) + 2 * s.ranks + rank;
      failed_from.push_back(rank == s.rank ? nullptr : failed);
    }
    windows = {values_to.data(), back_to.data(), tails_to.data(), room.data(), flags_to.data(), values_from.data(),
               back_from.data(), tails_from.data(), flags_from.data(), sums.data(), &fault, s.rows, s.rank, s.ranks, s.layer,
               failed_from.data()};
  }
  // Both halves of a word that one peer stores: for rows, then for sums.
  uint64_t* stored_flag(int peer, bool for_sums) {
    return reinterpret_cast<uint64_t*>(flags->stored()) + (for_sums ? s.ranks : 0) + peer;
  }
  // low: the layer and the count.
  void store(int peer, bool for_sums, uint32_t epoch, uint32_t low) {
    __atomic_store_n(stored_flag(peer, for_sums), uint64_t(epoch) << 32 | low, __ATOMIC_RELEASE);
  }
  uint32_t of_this_layer(uint32_t count) const { return s.layer << kLayerAt | (count & kCountMask); }
  void store_slot(int peer, int row, int k, int32_t slot) {
    volatile uint8_t* to = tails_in[size_t(peer)]->stored() + row * s.tail_bytes() + s.scale_bytes + 4 * k;
    for (int byte = 0; byte < 4; ++byte) to[byte] = uint8_t(uint32_t(slot) >> 8 * byte);
  }
  bool intact() const {
    return std::all_of(parts.begin(), parts.end(), [](const auto& part) { return part->intact(); });
  }
};

// The lower half of a flag: any layer and count, UINT32_MAX (the peer has failed), or any count of this layer.
uint32_t hostile_count(const World& w, Random& random, int64_t limit) {
  const uint32_t values[] = {INT_MAX, UINT32_MAX, uint32_t(INT_MIN), uint32_t(limit + 1), uint32_t(limit), 0, random.bits()};
  const uint32_t value = values[random.pick(0, 6)];
  return random.one_in(2) ? value : w.of_this_layer(value);
}
int32_t hostile_slot(Random& random, int slots) {
  const int32_t values[] = {INT_MAX, INT_MIN, -2, -1, slots, slots - 1, int32_t(random.bits())};
  return values[random.pick(0, 6)];
}
uint32_t other_epoch(Random& random, uint32_t epoch) {
  const uint32_t values[] = {epoch - 1, epoch + 1, epoch + (1u << 31), epoch + (1u << 31) - 1, 0, random.bits()};
  return values[random.pick(0, 5)];
}

// One call of the rank under test, with buffers of its own that are heap blocks of exactly the size the ABI asks for.
struct Call {
  World& w;
  Random& random;
  const int seed;
  const uint32_t epoch;
  std::vector<uint8_t> x, scales;
  std::vector<int32_t> ids, rank_of, slot_of, token_of;
  std::vector<float> weights;
  std::vector<int64_t> sent, received, firsts;

  Call(World& world, Random& draw, int number, uint32_t now) : w(world), random(draw), seed(number), epoch(now) {
    const Shape& s = w.s;
    const int64_t row = s.quantize == kAsIs ? s.value_bytes : s.columns * (s.row_type == kRowsF32 ? 4 : 2);
    x.resize(size_t(s.tokens * row));
    scales.resize(s.quantize == kAsIs ? size_t(s.tokens * s.scale_bytes) : 0);
    for (uint8_t& byte : x) byte = uint8_t(random.bits());
    for (uint8_t& byte : scales) byte = uint8_t(random.bits());
    for (int expert = 0; expert < s.ranks * s.slots; ++expert) {
      rank_of.push_back(expert / s.slots);
      slot_of.push_back(expert % s.slots);
    }
    ids.resize(size_t(s.tokens * s.top_k));
    for (int32_t& id : ids) id = random.pick(-1, s.ranks * s.slots - 1);
    weights.assign(ids.size(), 0.5f);
    token_of.resize(size_t(s.ranks * s.tokens));
    sent.resize(size_t(s.ranks));
    received.resize(size_t(s.ranks));
    firsts.resize(size_t(s.ranks));
  }
  MoeMkSend send() {
    const Shape& s = w.s;
    const int64_t stride = s.tokens == 0 ? 0 : int64_t(x.size()) / s.tokens;
    return {x.data(), scales.empty() ? nullptr : scales.data(), ids.data(), weights.data(), rank_of.data(), slot_of.data(),
            token_of.data(), sent.data(), s.tokens, stride, s.value_bytes, s.scale_bytes, s.top_k, int32_t(rank_of.size()),
            s.columns, s.row_type, s.quantize, s.threads, s.isa, epoch, 0};
  }
  void dispatch() {
    MoeMkSend call = send();
    expect(moe_mk_exchange_dispatch(&w.windows, &call) == kOk && call.sent == 1, "dispatch", seed);
  }
  // Invalid ids and tables of a caller: nothing is written, and a status is returned.
  void dispatch_bad_tables() {
    if (ids.empty()) return;
    const size_t at = size_t(random.pick(0, int(ids.size()) - 1));
    const int32_t id = ids[at];
    MoeMkSend call = send();
    const std::vector<uint8_t> before(w.raised->seen(), w.raised->seen() + w.raised->size());
    ids[at] = random.one_in(2) ? int32_t(rank_of.size()) : INT_MAX;
    expect(moe_mk_exchange_dispatch(&w.windows, &call) == kBadId, "an id of no expert", seed);
    ids[at] = 0;
    const int32_t rank = rank_of[0];
    rank_of[0] = random.one_in(2) ? w.s.ranks : INT_MIN;
    expect(moe_mk_exchange_dispatch(&w.windows, &call) == kBadShape, "an expert of no rank", seed);
    expect(std::equal(before.begin(), before.end(), w.raised->seen()), "no flag is raised for a refused call", seed);
    rank_of[0] = rank;
    ids[at] = id;
  }
  int32_t await(bool for_sums) {
    if (!for_sums) received[size_t(w.s.rank)] = sent[size_t(w.s.rank)];
    return moe_mk_exchange_await(&w.windows, for_sums, epoch, random.one_in(4) ? 5 : 0,
                                 for_sums ? firsts.data() : received.data());
  }
  // Checks the result: ids in range, and every byte if no peer stores concurrently.
  int32_t receive(bool quiet) {
    const Shape& s = w.s;
    int64_t total = 0, before = 0;
    for (int rank = 0; rank < s.ranks; ++rank) {
      expect(received[size_t(rank)] >= 0 && received[size_t(rank)] <= s.rows, "counts are within limits", seed);
      total += received[size_t(rank)];
      before += rank <= w.left ? received[size_t(rank)] : 0;
    }
    std::vector<uint8_t> scale_rows(size_t(total * s.scale_bytes)), id_rows(size_t(total * s.top_k * 4)), weight_rows(id_rows);
    uint8_t* values = w.window->stored() + (int64_t(w.left + 1) * s.rows - before) * s.value_bytes;
    const MoeMkReceive call = {received.data(), values, scale_rows.data(), id_rows.data(), weight_rows.data(), s.value_bytes,
                               s.scale_bytes, s.top_k, s.slots};
    const int32_t status = moe_mk_exchange_receive(&w.windows, &call);
    if (status != kOk) {
      const MoeMkFault& f = w.fault;
      const bool named = f.kind == kNoSuchSlot && f.peer >= 0 && f.peer < s.ranks && f.limit == s.slots && f.row >= 0 &&
                         f.row < received[size_t(f.peer)] && (f.value < -1 || f.value >= s.slots);
      expect(status == kPeerFault && named, "a slot out of range is named", seed);
      return status;
    }
    int64_t row = 0;
    for (int rank = 0; rank < s.ranks; ++rank)
      for (int64_t i = 0; i < received[size_t(rank)]; ++i, ++row) {
        for (int k = 0; k < s.top_k; ++k) {
          int32_t slot;
          std::memcpy(&slot, id_rows.data() + (row * s.top_k + k) * 4, 4);
          expect(slot >= -1 && slot < s.slots, "slots are in range", seed);
        }
        if (!quiet) continue;
        const uint8_t* tail = w.tails_from[size_t(rank)] + i * s.tail_bytes();
        const uint8_t* from = w.values_from[size_t(rank)] - received[size_t(rank)] * w.back_from[size_t(rank)] + i * s.value_bytes;
        const bool same = std::equal(tail, tail + s.scale_bytes, scale_rows.begin() + row * s.scale_bytes) &&
                          std::memcmp(tail + s.scale_bytes, id_rows.data() + row * s.top_k * 4, size_t(s.top_k * 4)) == 0 &&
                          std::memcmp(from, values + row * s.value_bytes, size_t(s.value_bytes)) == 0;
        expect(same, "rows are those that were sent", seed);
      }
    return status;
  }
  // Sums are powers of two by rank, so that each output identifies the ranks it is the sum of.
  int32_t collect() {
    const Shape& s = w.s;
    std::vector<uint8_t> own(size_t(sent[size_t(s.rank)] * s.sum_bytes())), out(size_t(s.tokens * s.sum_bytes()));
    fill(own.data(), int64_t(own.size()), s.rank);
    MoeMkAddUp call = {token_of.data(), sent.data(), firsts.data(), own.data(), out.data(), s.tokens, s.hidden, s.row_type,
                       s.threads, s.isa, epoch, random.one_in(4) ? 5 : 0};
    const int32_t status = moe_mk_exchange_collect(&w.windows, &call);
    for (int rank = 0; rank < s.ranks; ++rank)
      expect(firsts[size_t(rank)] >= 0 && firsts[size_t(rank)] <= int64_t(s.rank) * s.rows, "offsets are within limits", seed);
    if (status != kOk) return status;
    std::vector<int> visited(size_t(s.tokens), 0);
    for (int rank = 0; rank < s.ranks; ++rank)
      for (int64_t row = 0; row < sent[size_t(rank)]; ++row) visited[size_t(token_of[size_t(rank * s.tokens + row)])] |= 1 << rank;
    std::vector<uint8_t> wanted(size_t(s.sum_bytes()));
    for (int token = 0; token < s.tokens; ++token) {
      write_numbers(wanted.data(), s.sum_bytes(), float(visited[size_t(token)]));
      expect(std::memcmp(wanted.data(), out.data() + token * s.sum_bytes(), wanted.size()) == 0, "sums are right", seed);
    }
    return status;
  }
  void fill(uint8_t* to, int64_t size, int rank) { write_numbers(to, size, float(1 << rank)); }
  // Small whole numbers: exact in every row type.
  void write_numbers(uint8_t* to, int64_t size, float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, 4);
    const bool none = number == 0.0f;
    const uint32_t f16 = none ? 0 : ((bits >> 23) - 112) << 10 | (bits >> 13 & 0x3ff);
    const uint32_t word = w.s.row_type == kRowsF32 ? bits : w.s.row_type == kRowsBf16 ? bits >> 16 : f16;
    const int64_t width = w.s.row_type == kRowsF32 ? 4 : 2;
    for (int64_t at = 0; at < size; at += width) std::memcpy(to + at, &word, size_t(width));
  }
};

// The stores of all peers in an ordinary call.
void store_honest(World& w, Call& call, Random& random) {
  const Shape& s = w.s;
  w.window->scramble(random);
  for (int peer = 0; peer < s.ranks; ++peer) {
    call.fill(w.sums_at[size_t(peer)]->stored(), int64_t(w.sums_at[size_t(peer)]->size()), peer);
    if (peer == s.rank) continue;
    w.tails_in[size_t(peer)]->scramble(random);
    if (Part* apart = w.apart[size_t(peer)]) apart->scramble(random);
    for (int row = 0; row < s.rows; ++row)
      for (int k = 0; k < s.top_k; ++k) w.store_slot(peer, row, k, random.pick(-1, s.slots - 1));
    w.store(peer, false, call.epoch, w.of_this_layer(uint32_t(random.pick(0, s.rows))));
    w.store(peer, true, call.epoch, w.of_this_layer(uint32_t(random.pick(0, s.rank * s.rows))));
  }
}

// The expected outcome of a wait, from the stored words.
int32_t outcome(World& w, bool for_sums, uint32_t epoch, MoeMkFault* fault) {
  const int64_t limit = for_sums ? int64_t(w.s.rank) * w.s.rows : w.s.rows;
  int32_t status = kOk;
  for (int peer = 0; peer < w.s.ranks; ++peer) {
    if (peer == w.s.rank) continue;
    const uint64_t word = *w.stored_flag(peer, for_sums);
    const uint32_t layer = uint32_t(word) >> kLayerAt;
    const int64_t value = int64_t(uint32_t(word) & kCountMask);
    const MoeMkFault faults[] = {{kPeerFailed, peer, 0, 0, 0},
                                 {kOtherLayer, peer, layer, w.s.layer, 0},
                                 {for_sums ? kSumsBeyond : kTooManyRows, peer, value, limit, 0}};
    const MoeMkFault* found = nullptr;
    if (uint32_t(word) == UINT32_MAX) found = &faults[0];
    else if (int32_t(uint32_t(word >> 32) - epoch) < 0) status = kLate;
    else if (layer != w.s.layer) found = &faults[1];
    else if (value > limit) found = &faults[2];
    if (found == nullptr) continue;
    *fault = *found;
    return kPeerFault;
  }
  return status;
}

bool equal(const MoeMkFault& one, const MoeMkFault& other) {
  return one.kind == other.kind && one.peer == other.peer && one.value == other.value && one.limit == other.limit;
}

int another(Random& random, const Shape& s) {
  const int peer = random.pick(0, s.ranks - 2);
  return peer < s.rank ? peer : peer + 1;
}

// Changes one word.
void store_hostile(World& w, Random& random, uint32_t epoch) {
  const Shape& s = w.s;
  const int peer = another(random, s);
  const bool for_sums = random.one_in(2);
  switch (random.pick(0, 2)) {
    case 0: return w.store(peer, for_sums, epoch, hostile_count(w, random, for_sums ? s.rank * s.rows : s.rows));
    case 1: return w.store(peer, for_sums, other_epoch(random, epoch), hostile_count(w, random, s.rows));
    default: return w.store_slot(peer, random.pick(0, s.rows - 1), random.pick(0, s.top_k - 1), hostile_slot(random, s.slots));
  }
}

// Words stored before the call: the outcome is known.
void before_the_call(World& w, Random& random, int seed, uint32_t epoch) {
  Call call(w, random, seed, epoch);
  store_honest(w, call, random);
  for (int words = random.pick(0, 3); words > 0; --words) store_hostile(w, random, epoch);
  call.dispatch_bad_tables();
  call.dispatch();
  MoeMkFault wanted = {};
  const int32_t rows = outcome(w, false, epoch, &wanted);
  expect(call.await(false) == rows, "the outcome of a wait for rows", seed);
  if (rows == kPeerFault) expect(equal(w.fault, wanted), "the fault of a wait for rows", seed);
  if (rows == kOk && call.receive(true) == kOk) moe_mk_exchange_show(&w.windows, epoch, call.received.data());
  const int32_t sums = outcome(w, true, epoch, &wanted);
  expect(call.collect() == sums, "the outcome of a wait for sums", seed);
  if (sums == kPeerFault) expect(equal(w.fault, wanted), "the fault of a wait for sums", seed);
}

// The stores a peer repeats while calls run: one word that alternates between valid and invalid, so that a word which is
// loaded twice soon changes between its check and its use; or arbitrary words.
class Rewriting {
 public:
  Rewriting(World& world, uint32_t now, int seed) : w_(world), epoch_(now), random_{std::mt19937(unsigned(seed) + 1)} {
    const int peer = another(random_, w_.s), kind = random_.pick(0, 3);
    thread_ = std::thread([this, peer, kind] {
      while (!done_.load(std::memory_order_relaxed)) kind < 2 ? flip_flag(peer, kind == 1) : kind == 2 ? flip_slots(peer) : any();
    });
  }
  Rewriting(const Rewriting&) = delete;
  ~Rewriting() {
    done_ = true;
    thread_.join();
  }

 private:
  void flip_flag(int peer, bool for_sums) {
    const int limit = for_sums ? w_.s.rank * w_.s.rows : w_.s.rows;
    const uint32_t honest = w_.of_this_layer(uint32_t(random_.pick(0, limit)));
    const uint32_t hostile = w_.of_this_layer(random_.one_in(2) ? INT_MAX : uint32_t(limit + 1));
    for (int turn = 0; turn < 200; ++turn) w_.store(peer, for_sums, epoch_, turn % 2 ? hostile : honest);
  }
  void flip_slots(int peer) {
    const int row = random_.pick(0, w_.s.rows - 1), k = random_.pick(0, w_.s.top_k - 1);
    const int32_t hostile = hostile_slot(random_, w_.s.slots);
    for (int turn = 0; turn < 200; ++turn) w_.store_slot(peer, row, k, turn % 2 ? hostile : -1);
    w_.store_slot(peer, row, k, -1);
  }
  void any() {
    store_hostile(w_, random_, epoch_);
    const int peer = another(random_, w_.s);
    w_.store(peer, false, epoch_, w_.of_this_layer(uint32_t(random_.pick(0, w_.s.rows))));
    w_.store(peer, true, epoch_, w_.of_this_layer(uint32_t(random_.pick(0, w_.s.rank * w_.s.rows))));
    w_.store_slot(peer, random_.pick(0, w_.s.rows - 1), random_.pick(0, w_.s.top_k - 1), random_.pick(-1, w_.s.slots - 1));
  }

  World& w_;
  const uint32_t epoch_;
  Random random_;
  std::atomic<bool> done_{false};
  std::thread thread_;
};

// Words that another thread stores continuously.
void during_the_call(World& w, Random& random, int seed, uint32_t epoch) {
  Call call(w, random, seed, epoch);
  store_honest(w, call, random);
  call.dispatch();
  const Rewriting peer(w, epoch, seed);
  for (int turn = 0; turn < 100; ++turn) {
    if (call.await(false) == kOk && call.receive(false) == kOk)
      moe_mk_exchange_show(&w.windows, epoch, call.received.data());
    call.collect();
  }
}

}  // namespace

void exchange(int seed) {
  Random random{std::mt19937(unsigned(seed))};
  World world(draw_shape(random));
  uint32_t epoch = random.one_in(2) ? UINT32_MAX - 2 : 1;  // epochs wrap
  for (int call = 0; call < 6; ++call) before_the_call(world, random, seed, epoch++);
  during_the_call(world, random, seed, epoch);
  expect(world.intact(), "nothing is written before a part", seed);
}

}  // namespace moe_mk::fuzz
