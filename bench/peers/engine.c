/* Two mock vLLM engines in one process, a prefill and a decode one, cheap enough to keep a router's core busy from another core.
 *
 *     engine [MODEL]
 *
 * Prints {"prefill":PORT,"decode":PORT} once both listen on loopback, then takes commands on standard input, one a line, and answers each
 * with one line; ends when standard input does, so that it never outlives whoever started it:
 *
 *     gap_us N    microseconds between two tokens of one stream; 0 makes tokens as fast as the socket takes them
 *     step 0|1    1: the streams make their tokens at the same instants, as an engine's batch does; 0: each at its own
 *     stats       {"tokens":made so far,"streams":open now,"prefills":answered,"handoffs":decodes that named a prefill's KV}
 *
 * Events have the form in which vLLM 0.32 sends them. The text of each token is "~" and the CLOCK_MONOTONIC microsecond at which it was
 * made: what comes out of a router tells how long it took. Members of a request are found by name wherever they stand, without parsing the
 * body; the load generator's prompts contain no such names.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PREFILL, DECODE, BATCH = 256, READ = 16384, EVENT = 65536, BODY_MAX = 16 << 20 };

struct buffer {
    char *at;
    size_t start, end, room; /* the content is at[start..end) */
};

struct connection {
    int fd, role;
    bool wants_write, streaming, chat, ids, usage;
    long wanted, made, prompt_tokens; /* of the stream in progress */
    int64_t due;
    struct connection *before, *after; /* in the ring of streams that wait for their next token */
    char id[64];
    struct buffer in, out;
};

static const char *model = "bench";
static long gap_us, step;
static struct { long tokens, streams, prefills, handoffs; } stats;
static int poller;
static int ports[2];
static struct connection ring = {.before = &ring, .after = &ring}; /* ordered by due time, since all have the same gap */

static int64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

/* ---- buffers */

static char *reserve(struct buffer *b, size_t more)
{
    if (b->start == b->end) b->start = b->end = 0;
    if (b->end + more > b->room) {
        size_t held = b->end - b->start;
        if (b->start) memmove(b->at, b->at + b->start, held);
        b->start = 0;
        b->end = held;
        if (held + more > b->room) {
            b->room = 2 * (held + more);
            b->at = realloc(b->at, b->room);
            if (!b->at) abort();
        }
    }
    return b->at + b->end;
}

static void append(struct buffer *b, const char *bytes, size_t size)
{
    memcpy(reserve(b, size), bytes, size);
    b->end += size;
}

/* ---- the ring of waiting streams */

static void leave_ring(struct connection *c)
{
    if (!c->after) return;
    c->before->after = c->after;
    c->after->before = c->before;
    c->before = c->after = NULL;
}

static void join_ring(struct connection *c, int64_t due)
{
    leave_ring(c);
    c->due = due;
    c->before = ring.before;
    c->after = &ring;
    ring.before->after = c;
    ring.before = c;
}

/* ---- sockets */

static void drop(struct connection *c)
{
    if (c->streaming) stats.streams--;
    leave_ring(c);
    close(c->fd);
    free(c->in.at);
    free(c->out.at);
    free(c);
}

/* Send what there is; false if the connection is gone. */
static bool flush(struct connection *c)
{
    struct buffer *b = &c->out;
    while (b->start < b->end) {
        ssize_t sent = send(c->fd, b->at + b->start, b->end - b->start, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && errno != EAGAIN) {
            drop(c);
            return false;
        }
        if (sent < 0) break;
        b->start += (size_t)sent;
    }
    bool wants = b->start < b->end;
    if (wants != c->wants_write) {
        struct epoll_event interest = {.events = EPOLLIN | (wants ? EPOLLOUT : 0), .data.ptr = c};
        epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &interest);
        c->wants_write = wants;
    }
    return true;
}

/* ---- answers */

static void respond(struct connection *c, int status, const char *type, const char *body, size_t size)
{
    char head[256];
    int length = snprintf(head, sizeof head, "HTTP/1.1 %d %s\r\nserver: uvicorn\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n",
                          status, status == 200 ? "OK" : "Error", type, size);
    append(&c->out, head, (size_t)length);
    append(&c->out, body, size);
}

static unsigned token_id(void)
{
    static unsigned state = 12345;
    state = state * 1664525u + 1013904223u;
    return 1000 + (state >> 8) % 120000;
}

static int id_list(char *to, long count)
{
    char *at = to;
    for (long n = 0; n < count; n++) at += sprintf(at, n ? ",%u" : "[%u", token_id());
    return (int)(at - to) + sprintf(at, count ? "]" : "[]");
}

static void chunk(struct connection *c, const char *bytes, int size)
{
    char head[16];
    append(&c->out, head, (size_t)sprintf(head, "%x\r\n", (unsigned)size));
    append(&c->out, bytes, (size_t)size);
    append(&c->out, "\r\n", 2);
}

static int event_start(struct connection *c, char *to)
{
    return sprintf(to, "data: {\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":\"%s\",\"choices\":[", c->id,
                   c->chat ? "chat.completion.chunk" : "text_completion", (long long)time(NULL), model);
}

static void token_event(struct connection *c)
{
    static char text[EVENT];
    int size = event_start(c, text);
    bool last = c->made + 1 == c->wanted;
    char id[32] = "null";
    if (c->ids) sprintf(id, "[%u]", token_id());
    if (c->chat) {
        size += sprintf(text + size, "{\"index\":0,\"delta\":{\"content\":\"~%lld\"},\"logprobs\":null,\"finish_reason\":%s\"token_ids\":%s}]}\n\n",
                        (long long)now_us(), last ? "\"length\",\"stop_reason\":null," : "null,", id);
    } else {
        size += sprintf(text + size,
                        "{\"index\":0,\"text\":\"~%lld\",\"logprobs\":null,\"finish_reason\":%s,\"stop_reason\":null,\"prompt_token_ids\":",
                        (long long)now_us(), last ? "\"length\"" : "null");
        if (c->ids && !c->made) size += id_list(text + size, c->prompt_tokens);
        else size += sprintf(text + size, "null");
        size += sprintf(text + size, ",\"token_ids\":%s}]}\n\n", id);
    }
    chunk(c, text, size);
    c->made++;
    stats.tokens++;
}

static void end_stream(struct connection *c)
{
    static char text[1024];
    if (c->usage) {
        int size = event_start(c, text);
        size += sprintf(text + size, "],\"usage\":{\"prompt_tokens\":%ld,\"total_tokens\":%ld,\"completion_tokens\":%ld}}\n\n",
                        c->prompt_tokens, c->prompt_tokens + c->made, c->made);
        chunk(c, text, size);
    }
    chunk(c, "data: [DONE]\n\n", 14);
    append(&c->out, "0\r\n\r\n", 5);
    c->streaming = false;
    stats.streams--;
}

/* The next token of a stream, and when the one after it is due. */
static void advance(struct connection *c)
{
    leave_ring(c);
    token_event(c);
    if (c->made == c->wanted) {
        end_stream(c);
        flush(c);
        return;
    }
    if (!flush(c) || c->wants_write) return; /* goes on when the socket has room again */
    int64_t now = now_us(), due = c->due + gap_us;
    if (step && gap_us) due = (now / gap_us + 1) * gap_us;
    join_ring(c, due < now - gap_us ? now : due);
}

static void whole_answer(struct connection *c, bool prefill)
{
    static char text[2 * EVENT];
    int size = sprintf(text, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":\"%s\",\"choices\":[{\"index\":0,%s", c->id,
                       c->chat ? "chat.completion" : "text_completion", (long long)time(NULL), model,
                       c->chat ? "\"message\":{\"role\":\"assistant\",\"content\":\"" : "\"text\":\"");
    for (long n = 0; n < c->wanted; n++) size += sprintf(text + size, "~%lld", (long long)now_us());
    size += sprintf(text + size, "%s\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null,\"token_ids\":",
                    c->chat ? "\"}," : "\",");
    if (c->ids) size += id_list(text + size, c->wanted);
    else size += sprintf(text + size, "null");
    size += sprintf(text + size, "}],\"usage\":{\"prompt_tokens\":%ld,\"total_tokens\":%ld,\"completion_tokens\":%ld},\"kv_transfer_params\":",
                    c->prompt_tokens, c->prompt_tokens + c->wanted, c->wanted);
    if (prefill) {
        size += sprintf(text + size, "{\"do_remote_prefill\":true,\"do_remote_decode\":false,\"remote_block_ids\":[");
        size += id_list(text + size, c->prompt_tokens / 16 + 1);
        size += sprintf(text + size,
                        "],\"remote_engine_id\":\"bench-%d\",\"remote_request_id\":\"%s-0\",\"remote_host\":\"127.0.0.1\",\"remote_port\":%d,"
                        "\"tp_size\":1,\"remote_num_tokens\":%ld,\"transfer_mode\":\"pull\"}", (int)getpid(), c->id, ports[PREFILL],
                        c->prompt_tokens);
    } else {
        size += sprintf(text + size, "null");
    }
    text[size++] = '}';
    stats.tokens += c->wanted;
    respond(c, 200, "application/json", text, (size_t)size);
}

/* ---- requests */

/* Where the value of the named member begins, or NULL. */
static const char *member(const char *body, const char *name)
{
    char quoted[64];
    sprintf(quoted, "\"%s\"", name);
    const char *at = strstr(body, quoted);
    if (!at) return NULL;
    at += strlen(quoted);
    while (*at == ' ' || *at == ':') at++;
    return at;
}

static bool holds(const char *body, const char *name, const char *value)
{
    const char *at = member(body, name);
    return at && !strncmp(at, value, strlen(value));
}

static void completion(struct connection *c, const char *body, size_t size, bool chat)
{
    static long serial;
    const char *limit = member(body, "max_completion_tokens");
    if (!limit || *limit == 'n') limit = member(body, "max_tokens");
    bool keeps_kv = holds(body, "do_remote_decode", "true");
    bool rendezvous = member(body, "bootstrap_room") != NULL;
    bool prefill = keeps_kv || (c->role == PREFILL && rendezvous);
    char named[256];
    snprintf(named, sizeof named, "\"%s\"", model);
    if (member(body, "model") && !holds(body, "model", named)) { /* how our router releases a hand-off that nobody fetches */
        static const char unknown[] = "{\"error\":{\"message\":\"The model does not exist.\",\"type\":\"NotFoundError\",\"param\":\"model\",\"code\":404}}";
        respond(c, 404, "application/json", unknown, sizeof unknown - 1);
        flush(c);
        return;
    }
    c->chat = chat;
    c->ids = holds(body, "return_token_ids", "true");
    c->usage = holds(body, "include_usage", "true");
    c->wanted = c->role == PREFILL ? 1 : limit && *limit != 'n' ? atol(limit) : 16;
    if (c->wanted < 1) c->wanted = 1;
    c->made = 0;
    c->prompt_tokens = (long)size / 4 < 2048 ? (long)size / 4 : 2048;
    snprintf(c->id, sizeof c->id, "%s-%08x-%08lx", chat ? "chatcmpl" : "cmpl", (unsigned)getpid(), ++serial);
    if (prefill) stats.prefills++;
    else if (rendezvous || holds(body, "remote_engine_id", "\"")) stats.handoffs++;
    if (!holds(body, "stream", "true")) {
        if (c->wanted > 1024) c->wanted = 1024;
        whole_answer(c, keeps_kv);
        flush(c);
        return;
    }
    static const char head[] = "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                               "transfer-encoding: chunked\r\n\r\n";
    append(&c->out, head, sizeof head - 1);
    c->streaming = true;
    stats.streams++;
    if (chat) {
        static char text[EVENT];
        int length = event_start(c, text);
        length += sprintf(text + length, "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
                                         "\"finish_reason\":null}]");
        if (c->ids) {
            length += sprintf(text + length, ",\"prompt_token_ids\":");
            length += id_list(text + length, c->prompt_tokens);
        }
        length += sprintf(text + length, "}\n\n");
        chunk(c, text, length);
    }
    c->due = now_us();
    advance(c);
}

static void get(struct connection *c, const char *path)
{
    static char text[1024];
    const char *type = "application/json";
    if (!strncmp(path, "/metrics", 8)) {
        type = "text/plain; version=0.0.4; charset=utf-8";
        sprintf(text,
                "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1700000000.5\n"
                "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine=\"0\",model_name=\"%s\"} %ld.0\n"
                "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{engine=\"0\",model_name=\"%s\"} 0.0\n"
                "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{engine=\"0\",model_name=\"%s\"} 0.0\n"
                "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size=\"16\",engine=\"0\","
                "kv_cache_size_tokens=\"4000000\",num_gpu_blocks=\"250000\"} 1.0\n", model, stats.streams, model, model);
    } else if (!strncmp(path, "/version", 8)) {
        sprintf(text, "{\"version\":\"0.32.0\"}");
    } else if (!strncmp(path, "/v1/models", 10)) {
        sprintf(text, "{\"object\":\"list\",\"data\":[{\"id\":\"%s\",\"object\":\"model\",\"created\":1700000000,\"owned_by\":\"vllm\","
                      "\"root\":\"%s\",\"parent\":null,\"max_model_len\":131072}]}", model, model);
    } else if (strstr(path, "server_info")) {
        sprintf(text, "{\"model_path\":\"%s\",\"served_model_name\":\"%s\",\"tp_size\":1,\"dp_size\":1,\"version\":\"0.5.23\","
                      "\"disaggregation_mode\":\"%s\"}", model, model, c->role == PREFILL ? "prefill" : "decode");
    } else if (strstr(path, "model_info")) {
        sprintf(text, "{\"model_path\":\"%s\",\"tokenizer_path\":\"%s\",\"is_generation\":true,\"model_type\":\"llama\"}", model, model);
    } else if (!strncmp(path, "/health", 7) || !strncmp(path, "/ping", 5)) {
        *text = 0;
    } else {
        sprintf(text, "{\"error\":{\"message\":\"Not Found\",\"type\":\"NotFoundError\",\"param\":null,\"code\":404}}");
        respond(c, 404, type, text, strlen(text));
        return;
    }
    respond(c, 200, type, text, strlen(text));
}

/* Answer the request if it is there as a whole. The connection may be gone afterwards. */
static void request(struct connection *c)
{
    struct buffer *in = &c->in;
    *reserve(in, 1) = 0; /* what follows searches for text */
    char *head = in->at + in->start, *end = strstr(head, "\r\n\r\n");
    if (!end) return;
    *end = 0;
    char *length = strcasestr(head, "\r\ncontent-length:");
    size_t size = length ? strtoul(length + 17, NULL, 10) : 0, head_size = (size_t)(end - head) + 4;
    bool chunked = strcasestr(head, "\r\ntransfer-encoding:") != NULL;
    *end = '\r';
    size_t held = in->end - in->start;
    if (chunked || size > BODY_MAX || held > head_size + size) { /* no router sends chunks or a second request before the answer */
        drop(c);
        return;
    }
    if (held < head_size + size) return;
    in->start = in->end;
    char *body = head + head_size, *path = strchr(head, ' ') + 1;
    if (!strncmp(head, "GET ", 4)) {
        get(c, path);
        flush(c);
    } else if (!strncmp(path, "/v1/completions ", 16) || !strncmp(path, "/v1/chat/completions ", 21)) {
        completion(c, body, size, path[4] == 'h');
    } else if (!strncmp(path, "/tokenize ", 10)) {
        static char text[EVENT];
        long count = (long)size / 4 < 2048 ? (long)size / 4 : 2048;
        int used = sprintf(text, "{\"count\":%ld,\"max_model_len\":131072,\"tokens\":", count);
        used += id_list(text + used, count);
        text[used++] = '}';
        respond(c, 200, "application/json", text, (size_t)used);
        flush(c);
    } else {
        respond(c, 404, "application/json", "{}", 2);
        flush(c);
    }
}

static void readable(struct connection *c)
{
    ssize_t got = recv(c->fd, reserve(&c->in, READ), READ, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
        drop(c);
        return;
    }
    c->in.end += (size_t)got;
    request(c);
}

/* ---- the loop */

static int listener(int *port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, size) || listen(fd, 4096) || getsockname(fd, (struct sockaddr *)&address, &size)) {
        perror("engine: listen");
        exit(1);
    }
    *port = ntohs(address.sin_port);
    return fd;
}

static void admit(int fd, int role)
{
    for (int peer; (peer = accept4(fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
        setsockopt(peer, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
        struct connection *c = calloc(1, sizeof *c);
        if (!c) abort();
        c->fd = peer;
        c->role = role;
        struct epoll_event interest = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(poller, EPOLL_CTL_ADD, peer, &interest);
    }
}

static void command(char *line)
{
    long value = strchr(line, ' ') ? atol(strchr(line, ' ')) : 0;
    if (!strncmp(line, "gap_us ", 7)) gap_us = value;
    else if (!strncmp(line, "step ", 5)) step = value;
    else if (strncmp(line, "stats", 5)) {
        printf("unknown command\n");
        fflush(stdout);
        return;
    }
    printf("{\"tokens\":%ld,\"streams\":%ld,\"prefills\":%ld,\"handoffs\":%ld}\n", stats.tokens, stats.streams, stats.prefills, stats.handoffs);
    fflush(stdout);
}

static void commands(void)
{
    static char held[256];
    static size_t used;
    ssize_t got = read(STDIN_FILENO, held + used, sizeof held - 1 - used);
    if (got <= 0) exit(0);
    used += (size_t)got;
    held[used] = 0;
    for (char *end; (end = strchr(held, '\n'));) {
        *end = 0;
        command(held);
        used -= (size_t)(end + 1 - held);
        memmove(held, end + 1, used + 1);
    }
    if (used == sizeof held - 1) exit(2);
}

int main(int count, char **arguments)
{
    if (count > 1) model = arguments[1];
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    int listeners[2] = {listener(&ports[PREFILL]), listener(&ports[DECODE])};
    static char marks[3]; /* their addresses tell listeners and commands from connections */
    poller = epoll_create1(EPOLL_CLOEXEC);
    for (int n = 0; n < 3; n++) {
        struct epoll_event interest = {.events = EPOLLIN, .data.ptr = &marks[n]};
        epoll_ctl(poller, EPOLL_CTL_ADD, n < 2 ? listeners[n] : STDIN_FILENO, &interest);
    }
    printf("{\"prefill\":%d,\"decode\":%d}\n", ports[PREFILL], ports[DECODE]);
    fflush(stdout);
    for (;;) {
        struct timespec wait, *timeout = NULL;
        if (ring.after != &ring) {
            int64_t left = ring.after->due - now_us();
            if (left < 0) left = 0;
            wait = (struct timespec){left / 1000000, left % 1000000 * 1000};
            timeout = &wait;
        }
        struct epoll_event found[BATCH];
        int events = epoll_pwait2(poller, found, BATCH, timeout, NULL);
        for (int n = 0; n < events; n++) {
            char *mark = found[n].data.ptr;
            if (mark == &marks[2]) commands();
            else if (mark >= marks && mark < &marks[2]) admit(listeners[mark - marks], (int)(mark - marks));
            else if (found[n].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(found[n].data.ptr);
            else {
                struct connection *c = found[n].data.ptr;
                if (flush(c) && !c->wants_write && c->streaming && !c->after) join_ring(c, now_us());
            }
        }
        /* Each stream that is due makes one token, then the sockets have their turn: `last` bounds a ring of streams without a gap. */
        int64_t now = now_us();
        struct connection *last = ring.before;
        while (ring.after != &ring && ring.after->due <= now + 50) {
            struct connection *c = ring.after;
            bool final = c == last;
            advance(c);
            if (final) break;
        }
    }
}
