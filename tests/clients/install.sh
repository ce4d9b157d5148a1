#!/usr/bin/env bash
# Installs the clients that the tests in this folder try against the router, into .clients/ of the checkout (which git ignores):
# a Python environment with litellm and langchain-openai, and openai for Node where npm is found. PYTHON=... picks the interpreter.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
python=${PYTHON:-python3}
mkdir -p .clients
echo '*' >.clients/.gitignore
cd .clients
if [ ! -x venv/bin/python ]; then
  "$python" -m venv venv 2>/dev/null || {
    "$python" -m venv --clear --without-pip venv
    "$python" -m pip --python venv/bin/python install --quiet pip
  }
fi
venv/bin/python -m pip install --quiet --upgrade openai litellm langchain-openai
venv/bin/python -m pip list --format=freeze | grep -iE '^(openai|litellm|langchain-openai)=='
if command -v npm >/dev/null; then
  mkdir -p node
  cp "$here/package.json" node/
  npm install --prefix node --no-audit --no-fund --loglevel=error
  node -p "'openai (npm) ' + require('./node/node_modules/openai/package.json').version"
else
  echo 'npm is not there: the Node client is left out' >&2
fi
