#!/usr/bin/env bash
# Prints the home of a Java 17 or newer, which Spark 4 needs.
#
# Searches $JAVA_HOME, PATH and /usr/lib/jvm. If there is no Java, installs it with apt if possible (root on Debian
# or Ubuntu), else prints what to run. With --find it only searches (exit status 1: not found).
set -euo pipefail

readonly MINIMUM=17

major() {  # major <java>: 17 for "openjdk version "17.0.15"", 8 for "1.8.0_412", 0 if it does not run
  local version
  version=$("$1" -version 2>&1 | sed -n 's/.*version "\([0-9._]*\).*/\1/p' | head -n 1) || true
  version=${version#1.}
  echo "${version%%[._]*}" | grep -E '^[0-9]+$' || echo 0
}

home_of() { dirname "$(dirname "$(readlink -f "$1")")"; }

find_java() {
  local candidates=() java
  [ -n "${JAVA_HOME:-}" ] && candidates+=("$JAVA_HOME/bin/java")
  java=$(command -v java || true)
  [ -n "$java" ] && candidates+=("$java")
  # 17 and 21 are what Spark is tested with; then whatever there is.
  candidates+=(/usr/lib/jvm/*17*/bin/java /usr/lib/jvm/*21*/bin/java /usr/lib/jvm/*/bin/java)
  for java in "${candidates[@]}"; do
    if [ -x "$java" ] && [ "$(major "$java")" -ge "$MINIMUM" ]; then
      home_of "$java"
      return 0
    fi
  done
  return 1
}

if find_java; then exit 0; fi
if [ "${1:-}" = "--find" ]; then exit 1; fi

packages=(openjdk-17-jre-headless openjdk-21-jre-headless openjdk-25-jre-headless default-jre-headless)
if ! command -v apt-get >/dev/null; then
  echo "Spark needs Java $MINIMUM or newer and none was found: install one with your package manager," \
    "or set JAVA_HOME to one." >&2
  exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "Spark needs Java $MINIMUM or newer and none was found: run" \
    "\`sudo apt-get install -y openjdk-17-jre-headless\` (on newer releases openjdk-21-jre-headless)," \
    "or set JAVA_HOME to one." >&2
  exit 1
fi

echo "No Java $MINIMUM or newer found; installing one with apt-get." >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >&2 || true
for package in "${packages[@]}"; do
  if apt-get install -y -qq --no-install-recommends "$package" >&2 && find_java; then exit 0; fi
done
echo "Spark needs Java $MINIMUM or newer, and apt-get could install none of ${packages[*]}:" \
  "install one by hand and set JAVA_HOME to it." >&2
exit 1
