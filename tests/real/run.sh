#!/usr/bin/env bash
# End-to-end tests against real engines: install them if missing, start a prefill and a decode engine and the router in
# front of them, run pytest on this folder, stop whatever was started here. Arguments go to pytest:
#
#     bash tests/real/run.sh -k cancel -x
#
# The router's environment must exist (`make install`). Settings: see engines.py and README.md.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
real=${NARWHAL_REAL:-$root/.real}
mkdir -p "$real/run" "$real/logs"
real=$(cd "$real" && pwd)
export NARWHAL_REAL=$real
bin=$root/.venv/bin
[[ -x $bin/narwhal-trio ]] || { echo "run.sh: no $bin/narwhal-trio; run 'make install' first" >&2; exit 2; }

exec 8>"$real/run.lock"
flock -n 8 || { echo "run.sh: another run uses $real" >&2; exit 2; }

engines=()
router=
step=
stop() {
  local code=$?
  trap - EXIT
  trap '' INT TERM HUP
  [[ -z $step ]] || { kill -TERM "$step" 2>/dev/null && wait "$step" || true; }
  if [[ -n $router ]]; then
    # A process group of its own; KILL for what a graceful end leaves behind.
    kill -TERM -- "-$router" 2>/dev/null || true
    for _ in $(seq 100); do
      kill -0 -- "-$router" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL -- "-$router" 2>/dev/null || true
    wait "$router" 2>/dev/null || true
  fi
  ((${#engines[@]} == 0)) || "$bin/python" "$here/engines.py" stop "${engines[@]}"
  exit "$code"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# In the background and waited for: bash runs no trap while a command is in the foreground. Nothing inherits the lock.
run() {
  "$@" 8>&- &
  step=$!
  local code=0
  wait "$step" || code=$?
  step=
  return "$code"
}

run bash "$here/install.sh"

# Engines that already run (a developer's `engines.py start`) are used as they are and left running.
mapfile -t stopped < <("$bin/python" "$here/engines.py" stopped)
if ((${#stopped[@]} > 0)); then
  engines=("${stopped[@]}")
  run "$bin/python" "$here/engines.py" start "${engines[@]}"
fi

"$bin/python" "$here/engines.py" config >"$real/run/router.toml"
rm -f "$real"/run/{state.json,journal.jsonl*}
log=$real/logs/router.log
(cd "$real/run" && exec setsid "$bin/narwhal-trio" serve --config router.toml --bind 127.0.0.1:0) \
  >"$log" 2>&1 8>&- </dev/null &
router=$!
url=
for _ in $(seq 300); do
  url=$(grep -oE 'ready on http://[^ "]+' "$log" | head -1 | cut -d' ' -f3) || true
  [[ -z $url ]] || break
  kill -0 "$router" 2>/dev/null || break
  sleep 0.1
done
[[ -n $url ]] || { cat "$log" >&2; echo "run.sh: the router didn't start" >&2; exit 1; }
echo "router: $url"

mapfile -t addresses < <("$bin/python" "$here/engines.py" urls)
export NARWHAL_REAL_ROUTER=$url NARWHAL_REAL_PREFILL=${addresses[0]} NARWHAL_REAL_DECODE=${addresses[1]}
code=0
cd "$root"
run "$bin/python" -m pytest tests/real -p no:cacheprovider "$@" || code=$?
((code == 0)) || { echo "--- end of the router's log ($log)"; tail -30 "$log"; }
exit "$code"
