#!/usr/bin/env bash
# Installs the clients that the tests in this folder try against the router, into .env/ beside this script (which git ignores):
# a Python environment with litellm and langchain-openai, and openai for Node where npm is found. PYTHON=... picks the interpreter.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
mkdir -p .env
if [ ! -x .env/venv/bin/python ]; then
  "$python" -m venv .env/venv 2>/dev/null || {
    "$python" -m venv --clear --without-pip .env/venv
    "$python" -m pip --python .env/venv/bin/python install --quiet pip
  }
fi
.env/venv/bin/python -m pip install --quiet --upgrade openai litellm langchain-openai
.env/venv/bin/python -m pip list --format=freeze | grep -iE '^(openai|litellm|langchain-openai)=='
if command -v npm >/dev/null; then
  mkdir -p .env/node
  cp package.json .env/node/
  npm install --prefix .env/node --no-audit --no-fund --loglevel=error
  node -p "'openai (npm) ' + require('./.env/node/node_modules/openai/package.json').version"
else
  echo 'npm is not there: the Node client is left out' >&2
fi
