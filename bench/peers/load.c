/* Load for an OpenAI-compatible server: many requests over keep-alive connections from one event loop, each answer checked.
 *
 *     load --port N [--connections N] [--tokens N] [--stream] [--rate PER_S] [--ramp S] [--warmup S] [--seconds S] [--model NAME] [--pid PID]...
 *
 * Each connection sends its next request when the last was answered in full; with --rate requests begin at fixed intervals instead, on
 * the connection that has been idle longest. After --warmup a window of --seconds is measured and one JSON object printed: requests that ended and tokens
 * that arrived in it, CPU of the processes --pid, failures, and quantiles of the TTFT, of the time from a token's making (see engine.c) to
 * its arrival, and of the whole request.
 *
 *     load --hold --port N [--tokens N] ...
 *
 * opens streams on command and keeps them: "open N" on standard input makes it N streams that are read, "stall N" N further ones that
 * are not. One JSON line answers each once every new stream has its first token, or was sent if it is not read. Ends with standard input.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
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

enum { BATCH = 256, READ = 65536, HEAD = 8192, PIDS = 64, PROMPT = 400, OPEN_PER_S = 400, PATIENCE_US = 120000000 };
enum state { IDLE, CONNECTING, IN_HEAD, IN_SIZE, IN_CHUNK, AFTER_CHUNK, IN_TRAILER, IN_BODY };
enum fault { REFUSED, STATUS, CUT, COUNT, UNFINISHED, FAULTS };
static const char *fault_names[FAULTS] = {"refused", "status", "cut_short", "wrong_count", "no_done"};

struct connection {
    int fd;
    enum state state;
    bool stalled, wants_write, in_token, chunked, closes;
    char *request;
    size_t size, sent;
    long wanted, tokens;
    int64_t began;
    char head[HEAD];
    size_t head_size;
    long left; /* bytes of the chunk or body */
    int status;
    int64_t stamp; /* of the token whose digits are arriving */
    unsigned tail; /* the last four bytes, to see the end mark across reads */
    bool done;
};

struct samples {
    uint32_t *at;
    size_t count, room;
};

static struct { int port; long connections, tokens; bool stream, hold; double rate, ramp, warmup, seconds; const char *model; } options = {
    .connections = 8, .tokens = 16, .warmup = 1, .seconds = 4, .model = "bench"};
static pid_t pids[PIDS];
static int pid_count, poller;
static struct connection **all, **idle;
static long all_count, idle_count, issued, opened, first_tokens, hold_failed;
static bool measuring;
static struct { long requests, tokens, faults[FAULTS]; int last_status; } seen;
static struct samples ttft, delay, whole;

static int64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static void keep(struct samples *s, int64_t value)
{
    if (s->count == s->room) {
        s->room = s->room ? 2 * s->room : 4096;
        s->at = realloc(s->at, s->room * sizeof *s->at);
        if (!s->at) abort();
    }
    s->at[s->count++] = value < 0 ? 0 : (uint32_t)value;
}

static int by_value(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void print_quantiles(const char *name, struct samples *s)
{
    qsort(s->at, s->count, sizeof *s->at, by_value);
    if (!s->count) {
        printf(",\"%s\":null", name);
        return;
    }
    printf(",\"%s\":{\"count\":%zu,\"p50\":%u,\"p99\":%u,\"p999\":%u,\"max\":%u}", name, s->count, s->at[s->count / 2],
           s->at[(size_t)((double)s->count * 0.99)], s->at[(size_t)((double)s->count * 0.999)], s->at[s->count - 1]);
}

/* User and system CPU of the processes together, all threads, ended ones too; their parts as /proc has them, in ticks. */
static double cpu_seconds(double *system)
{
    double total = 0;
    *system = 0;
    for (int n = 0; n < pid_count; n++) {
        clockid_t clock;
        struct timespec t;
        char path[64], text[1024];
        if (!clock_getcpuclockid(pids[n], &clock) && !clock_gettime(clock, &t)) total += (double)t.tv_sec + (double)t.tv_nsec / 1e9;
        snprintf(path, sizeof path, "/proc/%d/stat", (int)pids[n]);
        FILE *file = fopen(path, "r");
        if (!file) continue;
        text[fread(text, 1, sizeof text - 1, file)] = 0;
        fclose(file);
        unsigned long kernel;
        char *after_name = strrchr(text, ')');
        if (after_name && sscanf(after_name + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %lu", &kernel) == 1)
            *system += (double)kernel / (double)sysconf(_SC_CLK_TCK);
    }
    return total;
}

/* ---- requests */

static void prepare(struct connection *c)
{
    static const char words[] = "the quick brown fox jumps over the lazy dog and then ";
    char prompt[PROMPT + 1], body[PROMPT + 256];
    int size = sprintf(prompt, "%ld ", issued); /* no two alike: routers may look for prefixes they have seen */
    while (size < PROMPT) {
        prompt[size] = words[(size_t)size % (sizeof words - 1)];
        size++;
    }
    prompt[size] = 0;
    int length = sprintf(body, "{\"model\":\"%s\",\"prompt\":\"%s\",\"max_tokens\":%ld,\"stream\":%s}", options.model, prompt, c->wanted,
                         options.stream ? "true" : "false");
    c->request = realloc(c->request, (size_t)length + 256);
    if (!c->request) abort();
    c->size = (size_t)sprintf(c->request, "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
                                          "accept: */*\r\ncontent-length: %d\r\n\r\n%s", options.port, length, body);
    c->sent = 0;
}

static void watch(struct connection *c, int operation, bool write)
{
    struct epoll_event wanted = {.events = EPOLLIN | (write ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(poller, operation, c->fd, &wanted);
    c->wants_write = write;
}

/* The request ended, well if `fault` is FAULTS. */
static void finish(struct connection *c, enum fault fault)
{
    if (fault == FAULTS && c->status != 200) fault = STATUS;
    if (fault == FAULTS && c->tokens != c->wanted) fault = COUNT;
    if (fault == FAULTS && options.stream && !c->done) fault = UNFINISHED;
    if (fault == STATUS) seen.last_status = c->status;
    if (measuring) {
        seen.requests++;
        if (fault == FAULTS) keep(&whole, now_us() - c->began);
        else seen.faults[fault]++;
    }
    if (options.hold) hold_failed++;
    if (fault == REFUSED || fault == CUT || c->closes) {
        close(c->fd);
        c->fd = -1;
    }
    c->state = IDLE;
    idle[idle_count++] = c;
}

static void transmit(struct connection *c)
{
    while (c->sent < c->size) {
        ssize_t sent = send(c->fd, c->request + c->sent, c->size - c->sent, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && errno == EAGAIN) {
            if (!c->wants_write) watch(c, EPOLL_CTL_MOD, true);
            return;
        }
        if (sent < 0) {
            finish(c, CUT);
            return;
        }
        c->sent += (size_t)sent;
    }
    if (c->stalled) {
        epoll_ctl(poller, EPOLL_CTL_DEL, c->fd, NULL);
        first_tokens++;
    } else if (c->wants_write) {
        watch(c, EPOLL_CTL_MOD, false);
    }
}

static void begin(struct connection *c, int64_t due)
{
    issued++;
    c->began = due;
    /* The first streams are of all lengths up to the wanted one, so that they do not all end together later. */
    bool first = options.stream && !options.hold && options.rate == 0 && issued <= options.connections;
    c->wanted = first ? 1 + options.tokens * (issued - 1) / options.connections : options.tokens;
    if (c->wanted > options.tokens) c->wanted = options.tokens;
    c->tokens = 0;
    c->head_size = 0;
    c->stamp = 0;
    c->in_token = false;
    c->state = IN_HEAD;
    c->tail = 0;
    c->status = 0;
    c->done = c->chunked = c->closes = false;
    c->left = -1;
    prepare(c);
    if (c->fd >= 0) {
        transmit(c);
        return;
    }
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)options.port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0) {
        perror("load: socket");
        exit(1);
    }
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    if (c->stalled) setsockopt(c->fd, SOL_SOCKET, SO_RCVBUF, &(int){4096}, sizeof(int));
    c->state = CONNECTING;
    watch(c, EPOLL_CTL_ADD, true);
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS) finish(c, REFUSED);
}

/* ---- answers */

static void on_token(struct connection *c, int64_t now)
{
    c->tokens++;
    if (c->tokens == 1) first_tokens++;
    if (measuring) {
        seen.tokens++;
        if (c->tokens == 1) keep(&ttft, now - c->began);
        if (options.stream) keep(&delay, now - c->stamp);
    }
    c->stamp = 0;
}

/* Content without transfer framing: counts the tokens in it and sees the end mark. */
static void scan(struct connection *c, const char *at, size_t size, int64_t now)
{
    for (const char *end = at + size; at < end; at++) {
        if (c->in_token && *at >= '0' && *at <= '9') {
            c->stamp = 10 * c->stamp + (*at - '0');
            continue;
        }
        if (c->in_token) on_token(c, now);
        c->in_token = *at == '~';
        c->tail = c->tail << 8 | (unsigned char)*at;
        if (c->tail == ('O' << 24 | 'N' << 16 | 'E' << 8 | ']')) c->done = true;
    }
}

static bool parse_head(struct connection *c)
{
    if (sscanf(c->head, "HTTP/1.%*d %d", &c->status) != 1) return false;
    const char *field = strcasestr(c->head, "\r\ncontent-length:");
    if (field) c->left = atol(field + 17);
    field = strcasestr(c->head, "\r\ntransfer-encoding:");
    c->chunked = field && strcasestr(field, "chunked");
    field = strcasestr(c->head, "\r\nconnection:");
    c->closes = field && !strncasecmp(field + 13, " close", 6);
    return true;
}

/* False if these bytes are no answer that can be understood. */
static bool receive(struct connection *c, const char *at, size_t size, int64_t now)
{
    const char *end = at + size;
    while (at < end) {
        switch (c->state) {
        case IN_HEAD:
            if (c->head_size == HEAD - 1) return false;
            c->head[c->head_size++] = *at++;
            if (c->head_size < 4 || memcmp(c->head + c->head_size - 4, "\r\n\r\n", 4)) break;
            c->head[c->head_size] = 0;
            if (!parse_head(c)) return false;
            c->state = c->chunked ? IN_SIZE : IN_BODY;
            if (c->chunked) c->left = 0;
            else if (c->left == 0) finish(c, FAULTS);
            break;
        case IN_SIZE:
            if (*at >= '0' && *at <= '9') c->left = 16 * c->left + (*at - '0');
            else if ((*at | 32) >= 'a' && (*at | 32) <= 'f') c->left = 16 * c->left + ((*at | 32) - 'a' + 10);
            else if (*at == '\n') c->state = c->left ? IN_CHUNK : IN_TRAILER;
            else if (*at != '\r') return false;
            at++;
            break;
        case IN_CHUNK:
        case IN_BODY: {
            size_t part = (size_t)(end - at);
            if (c->left >= 0 && part > (size_t)c->left) part = (size_t)c->left;
            scan(c, at, part, now);
            at += part;
            if (c->left >= 0) c->left -= (long)part;
            if (c->left) break;
            if (c->state == IN_CHUNK) c->state = AFTER_CHUNK;
            else finish(c, FAULTS);
            break;
        }
        case AFTER_CHUNK:
            if (*at++ == '\n') c->state = IN_SIZE;
            break;
        case IN_TRAILER:
            if (*at++ == '\n') finish(c, FAULTS);
            break;
        default:
            return false;
        }
    }
    return true;
}

static void on_event(struct connection *c, uint32_t events)
{
    static char bytes[READ];
    if (c->state == CONNECTING) {
        int error = 0;
        getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &(socklen_t){sizeof error});
        if (error) {
            finish(c, REFUSED);
            return;
        }
        c->state = IN_HEAD;
    }
    if (c->state != IDLE && c->sent < c->size) {
        transmit(c);
        return;
    }
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    ssize_t got = recv(c->fd, bytes, sizeof bytes, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0 && c->state == IDLE) { /* the server ended a connection that it had kept */
        close(c->fd);
        c->fd = -1;
    } else if (got <= 0) {
        c->closes = true;
        finish(c, c->state == IN_BODY && !c->chunked && c->left < 0 ? FAULTS : CUT);
    } else if (!receive(c, bytes, (size_t)got, now_us())) {
        if (c->state != IDLE) finish(c, CUT);
    }
}

/* ---- the two ways to run */

static struct connection *connection(bool stalled)
{
    struct connection *c = calloc(1, sizeof *c);
    all = realloc(all, (size_t)(all_count + 1) * sizeof *all);
    idle = realloc(idle, (size_t)(all_count + 1) * sizeof *idle);
    if (!c || !all || !idle) abort();
    c->fd = -1;
    c->stalled = stalled;
    all[all_count++] = c;
    return c;
}

static void poll_until(int64_t until)
{
    struct epoll_event found[BATCH];
    int64_t left = until - now_us();
    if (left < 0) left = 0;
    struct timespec wait = {left / 1000000, left % 1000000 * 1000};
    int events = epoll_pwait2(poller, found, BATCH, &wait, NULL);
    for (int n = 0; n < events; n++)
        if (found[n].data.ptr) on_event(found[n].data.ptr, found[n].events);
}

static void measure(void)
{
    double cpu = 0, system = 0;
    int64_t start = now_us(), mark = start + (int64_t)(options.warmup * 1e6), end = mark + (int64_t)(options.seconds * 1e6);
    for (long n = 0; n < options.connections; n++) {
        struct connection *c = connection(false);
        idle[idle_count++] = c;
    }
    for (int64_t now; (now = now_us()) < end;) {
        if (!measuring && now >= mark) {
            measuring = true;
            cpu = cpu_seconds(&system);
            mark = now_us();
            end = mark + (int64_t)(options.seconds * 1e6);
        }
        int64_t until = measuring ? end : mark;
        while (idle_count) {
            int64_t due = now;
            if (options.rate > 0) due = start + (int64_t)((double)issued / options.rate * 1e6);
            else if (issued < options.connections) due = start + (int64_t)((double)issued / (double)options.connections * options.ramp * 1e6);
            if (due > now) {
                if (due < until) until = due;
                break;
            }
            struct connection *longest = *idle; /* in turn, as many clients would: none of them sends often */
            memmove(idle, idle + 1, (size_t)--idle_count * sizeof *idle);
            begin(longest, options.rate > 0 ? due : now);
        }
        poll_until(until);
    }
    double system_end, used = cpu_seconds(&system_end) - cpu, seconds = (double)(now_us() - mark) / 1e6;
    printf("{\"seconds\":%.4f,\"requests\":%ld,\"tokens\":%ld,\"open\":%ld,\"cpu_s\":%.6f,\"system_s\":%.2f,\"last_status\":%d,\"faults\":{", seconds,
           seen.requests, seen.tokens, options.connections - idle_count, used, system_end - system, seen.last_status);
    for (int n = 0; n < FAULTS; n++) printf("%s\"%s\":%ld", n ? "," : "", fault_names[n], seen.faults[n]);
    printf("}");
    print_quantiles("ttft_us", &ttft);
    print_quantiles("delay_us", &delay);
    print_quantiles("request_us", &whole);
    printf("}\n");
}

static void hold(void)
{
    char line[64], kind[16];
    long wanted;
    struct epoll_event input = {.events = EPOLLIN, .data.ptr = NULL};
    epoll_ctl(poller, EPOLL_CTL_ADD, STDIN_FILENO, &input);
    int64_t last = now_us();
    for (;;) {
        struct epoll_event found[BATCH];
        int events = epoll_wait(poller, found, BATCH, -1);
        bool asked = false;
        for (int n = 0; n < events; n++) {
            if (found[n].data.ptr) on_event(found[n].data.ptr, found[n].events);
            else asked = true;
        }
        if (!asked) continue;
        if (!fgets(line, sizeof line, stdin)) return;
        if (sscanf(line, "%15s %ld", kind, &wanted) != 2) exit(2);
        epoll_ctl(poller, EPOLL_CTL_DEL, STDIN_FILENO, NULL);
        bool stall = !strcmp(kind, "stall");
        if (stall) wanted += opened;
        int64_t patience = now_us() + PATIENCE_US;
        while ((opened < wanted || first_tokens + hold_failed < opened) && now_us() < patience) {
            if (opened < wanted && now_us() - last >= 1000000 / OPEN_PER_S) {
                last = now_us();
                opened++;
                begin(connection(stall), last);
            }
            poll_until(opened < wanted ? last + 1000000 / OPEN_PER_S : now_us() + 100000);
        }
        printf("{\"open\":%ld,\"first_tokens\":%ld,\"failed\":%ld,\"last_status\":%d}\n", opened, first_tokens, hold_failed, seen.last_status);
        fflush(stdout);
        epoll_ctl(poller, EPOLL_CTL_ADD, STDIN_FILENO, &input);
    }
}

int main(int count, char **arguments)
{
    static const struct option known[] = {
        {"port", 1, 0, 'p'}, {"connections", 1, 0, 'c'}, {"tokens", 1, 0, 't'}, {"stream", 0, 0, 's'}, {"rate", 1, 0, 'r'}, {"ramp", 1, 0, 'a'},
        {"warmup", 1, 0, 'w'}, {"seconds", 1, 0, 'd'}, {"model", 1, 0, 'm'}, {"pid", 1, 0, 'i'}, {"hold", 0, 0, 'h'}, {0}};
    for (int option; (option = getopt_long(count, arguments, "", known, NULL)) != -1;) {
        switch (option) {
        case 'p': options.port = atoi(optarg); break;
        case 'c': options.connections = atol(optarg); break;
        case 't': options.tokens = atol(optarg); break;
        case 's': options.stream = true; break;
        case 'r': options.rate = atof(optarg); break;
        case 'a': options.ramp = atof(optarg); break;
        case 'w': options.warmup = atof(optarg); break;
        case 'd': options.seconds = atof(optarg); break;
        case 'm': options.model = optarg; break;
        case 'i': if (pid_count < PIDS) pids[pid_count++] = atoi(optarg); break;
        case 'h': options.hold = options.stream = true; break;
        default: return 2;
        }
    }
    if (!options.port || options.connections < 1 || options.tokens < 1) {
        fprintf(stderr, "load: needs --port, and one connection and token at least\n");
        return 2;
    }
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    poller = epoll_create1(EPOLL_CLOEXEC);
    if (options.hold) hold();
    else measure();
    return 0;
}
