// The connection to another rank over a socket, and the messages on it; ranks_sockets.cpp.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <type_traits>

#include "ranks.h"

namespace specc::ranks {

using Clock = std::chrono::steady_clock;

enum class Word : int32_t { kCall = 0x53504331, kAbort, kClosed };

struct Head {
  Word word;
  int32_t pid;
  int64_t bytes;  // of the data after it; of an abort, of its text
  Call call;
  char version[32];
};
static_assert(std::is_trivially_copyable_v<Head>);
constexpr int64_t kHeadBytes = sizeof(Head);

struct Part {
  const char* data = nullptr;
  int64_t bytes = 0;
};

// The connection to another rank.
struct Peer {
  int socket = -1;
  State known;
  Clock::time_point heard_at{};
  // what it is to have; of parts that were sent nothing is left
  Head sent{};
  std::vector<Part> out;
  // what comes: a head, then `wanted` bytes of data. After those of this collective the head of the
  // next one may come, or an abort.
  Head got{};
  int64_t got_bytes = 0, wanted = 0, taken = 0;
  char* target = nullptr;
  bool is_checked = false, is_done = false;
  int error = -1;  // of the connection; 0: the other side has ended it, -1: it is open

  bool is_ended() const { return error >= 0; }

  // Whether something went; all parts, as far as the system takes them.
  bool send() {
    bool has_moved = false;
    while (!out.empty() && !is_ended()) {
      iovec parts[2];
      msghdr message{};
      message.msg_iov = parts;
      for (const Part& part : out)
        if (message.msg_iovlen < 2)
          parts[message.msg_iovlen++] = {const_cast<char*>(part.data),
                                         static_cast<size_t>(part.bytes)};
      ssize_t gone = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (gone < 0 && errno == EINTR) continue;
      if (gone < 0) {
        if (errno != EAGAIN && errno != EWOULDBLOCK) {
          // what it said before it went may be there to be read
          out.clear();
          if (is_done) error = errno;
        }
        break;
      }
      has_moved = true;
      while (gone > 0) {
        Part& part = out.front();
        const int64_t bytes = std::min<int64_t>(gone, part.bytes);
        part = {part.data + bytes, part.bytes - bytes};
        gone -= bytes;
        if (part.bytes == 0) out.erase(out.begin());
      }
    }
    return has_moved;
  }

  // Bytes that came; 0: none now, or none any more.
  int64_t receive(char* to, int64_t bytes) {
    for (;;) {
      const ssize_t came = ::recv(socket, to, bytes, MSG_DONTWAIT);
      if (came > 0) return came;
      if (came < 0 && errno == EINTR) continue;
      if (came == 0)
        error = 0;
      else if (errno != EAGAIN && errno != EWOULDBLOCK)
        error = errno;
      return 0;
    }
  }

  // Makes small messages go at once; whether it is a stream that can be one's peer.
  static bool prepare(int socket) {
    int kind = 0;
    socklen_t size = sizeof kind;
    if (::getsockopt(socket, SOL_SOCKET, SO_TYPE, &kind, &size) != 0 || kind != SOCK_STREAM)
      return false;
    const int on = 1;
    ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // not of a Unix socket
    return true;
  }
};

}  // namespace specc::ranks
