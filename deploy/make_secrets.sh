#!/bin/sh
# Certificates, tokens and Redis passwords of one installation: `deploy/make_secrets.sh DIRECTORY`.
#
# DIRECTORY is 0700; each service mounts its own folder below it and nothing else. The files in there
# are readable by all, because containers run under a user of their own. A repeat keeps what exists;
# `--renew` issues new certificates of the same authority, in place: servers take them up at the next
# connection. Servers are known by one name, not by address: replicas come and go.
set -eu
umask 022
renew=; days=${ROLLPACKER_CERTIFICATE_DAYS:-365}
if [ "${1:-}" = --renew ]; then renew=yes; shift; fi
[ $# -eq 1 ] || { echo "usage: $0 [--renew] DIRECTORY" >&2; exit 2; }
command -v openssl >/dev/null || { echo "openssl is missing; install the package openssl" >&2; exit 1; }
mkdir -p "$1/authority"
chmod 0700 "$1" "$1/authority"
cd "$1"

[ -f authority/ca.crt ] || openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes \
  -days 3650 -subj "/CN=rollpacker authority" -keyout authority/ca.key -out authority/ca.crt 2>/dev/null

certificate() {  # NAME EXTENSIONS
  mkdir -p "$1"
  [ -z "$renew" ] && [ -f "$1/tls.crt" ] && return 0
  printf '%s\n' "$2" >authority/extensions
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$1" \
    -keyout authority/new.key -out authority/new.csr 2>/dev/null
  openssl x509 -req -in authority/new.csr -CA authority/ca.crt -CAkey authority/ca.key \
    -CAcreateserial -days "$days" -extfile authority/extensions -out authority/new.crt 2>/dev/null
  cp authority/ca.crt "$1/ca.crt"
  chmod 0644 authority/new.key
  mv authority/new.key "$1/tls.key"
  mv authority/new.crt "$1/tls.crt"
  rm authority/new.csr authority/extensions
}

secret() { openssl rand -hex 32; }

token() {  # ROLE: the token is kept once, the coordinator and the workers know its hash
  [ -f "authority/$1.token" ] || secret >"authority/$1.token"
  printf '%s %s\n' "$1" "$(tr -d '\n' <"authority/$1.token" | openssl dgst -sha256 -r | cut -d' ' -f1)"
}

for service in coordinator rollout reward trainer; do
  certificate "$service" "subjectAltName=DNS:rollpacker-service,DNS:$service,DNS:localhost,IP:127.0.0.1
extendedKeyUsage=serverAuth,clientAuth"
done
for user in viewer operator prometheus; do certificate "$user" "extendedKeyUsage=clientAuth"; done

hashes="$(token viewer; token operator; token service)"
for service in coordinator rollout reward trainer; do
  printf '%s\n' "$hashes" >"$service/accepted_tokens"
  cp authority/service.token "$service/token"
done
for user in viewer operator; do cp "authority/$user.token" "$user/token"; done

mkdir -p redis grafana
[ -f grafana/admin_password ] || secret >grafana/admin_password
for service in coordinator trainer; do
  [ -f "authority/redis_$service.password" ] || secret >"authority/redis_$service.password"
  password="$(cat "authority/redis_$service.password")"
  printf 'ROLLPACKER_%s_REDIS_URL=redis://%s:%s@redis:6379/0\n' \
    "$(echo "$service" | tr a-z A-Z)" "$service" "$password" >"$service/redis.env"
done
{
  echo "user default off"
  for service in coordinator trainer; do
    hash="$(tr -d '\n' <"authority/redis_$service.password" | openssl dgst -sha256 -r | cut -d' ' -f1)"
    echo "user $service on #$hash ~rollpacker:* &rollpacker:* +@all -@admin -@dangerous +info +keys"
  done
  echo "user health on nopass -@all +ping"
} >redis/users.acl
echo "secrets of this installation: $(pwd)"
