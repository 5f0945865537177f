// SPDX-License-Identifier: MIT
//! What several test programs need: the library, noise, as much JSON as the conformance vectors have, and SHA-256.
#![allow(dead_code)] // each program uses a part
use std::collections::BTreeMap;

/// A context on the CPU; with the feature load, the library is opened first.
pub fn context() -> sparseattn::Context {
    open();
    sparseattn::Context::cpu().unwrap()
}

pub fn open() {
    #[cfg(feature = "load")]
    {
        let path = std::env::var_os("SPARSEATTN_LIBRARY").map(std::path::PathBuf::from);
        unsafe { sparseattn::load(path.as_deref()).unwrap() };
    }
}

pub fn noise(count: usize, mut seed: u32) -> Vec<f32> {
    let mut next = || {
        seed = seed.wrapping_mul(1664525).wrapping_add(1013904223);
        (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// The bits of the bfloat16 number next to x.
pub fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

pub fn from_bf16(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

#[derive(Debug, Clone)]
pub enum Json {
    Null,
    Number(f64),
    Text(String),
    List(Vec<Json>),
    Fields(BTreeMap<String, Json>),
}

impl Json {
    pub fn parse(text: &str) -> Json {
        let mut reader = Reader(text.as_bytes(), 0);
        let value = reader.value();
        reader.skip();
        assert_eq!(reader.1, text.len(), "more than one JSON value");
        value
    }
    pub fn get(&self, name: &str) -> Option<&Json> {
        match self {
            Json::Fields(fields) => fields.get(name),
            _ => panic!("no object"),
        }
    }
    pub fn items(&self) -> &[Json] {
        match self {
            Json::List(items) => items,
            _ => panic!("no list"),
        }
    }
    pub fn text(&self, name: &str) -> &str {
        match self.get(name) {
            Some(Json::Text(text)) => text,
            other => panic!("{name} is {other:?}"),
        }
    }
    /// null is minus infinity in the vectors.
    pub fn number(&self) -> f64 {
        match self {
            Json::Number(number) => *number,
            Json::Null => f64::NEG_INFINITY,
            _ => panic!("no number"),
        }
    }
    pub fn integer(&self, name: &str) -> i64 {
        self.get(name).unwrap().number() as i64
    }
    pub fn size(&self, name: &str) -> usize {
        self.integer(name) as usize
    }
}

struct Reader<'a>(&'a [u8], usize);

impl Reader<'_> {
    fn skip(&mut self) {
        while self.0.get(self.1).is_some_and(u8::is_ascii_whitespace) {
            self.1 += 1;
        }
    }
    fn peek(&mut self) -> u8 {
        self.skip();
        self.0[self.1]
    }
    fn expect(&mut self, byte: u8) {
        assert_eq!(self.peek(), byte, "at byte {}", self.1);
        self.1 += 1;
    }
    fn string(&mut self) -> String {
        self.expect(b'"');
        let begin = self.1;
        while self.0[self.1] != b'"' {
            self.1 += 1;
        }
        self.1 += 1;
        String::from_utf8(self.0[begin..self.1 - 1].to_vec()).unwrap()
    }
    fn each(&mut self, open: u8, close: u8, mut member: impl FnMut(&mut Self)) {
        self.expect(open);
        while self.peek() != close {
            member(self);
            if self.peek() != close {
                self.expect(b',');
            }
        }
        self.1 += 1;
    }
    fn value(&mut self) -> Json {
        match self.peek() {
            b'{' => {
                let mut fields = BTreeMap::new();
                self.each(b'{', b'}', |reader| {
                    let name = reader.string();
                    reader.expect(b':');
                    fields.insert(name, reader.value());
                });
                Json::Fields(fields)
            }
            b'[' => {
                let mut items = Vec::new();
                self.each(b'[', b']', |reader| items.push(reader.value()));
                Json::List(items)
            }
            b'"' => Json::Text(self.string()),
            b'n' => {
                self.1 += 4;
                Json::Null
            }
            _ => {
                let rest = &self.0[self.1..];
                let length = rest.iter().position(|b| b",]} \n".contains(b)).unwrap_or(rest.len());
                self.1 += length;
                Json::Number(std::str::from_utf8(&rest[..length]).unwrap().parse().unwrap())
            }
        }
    }
}

/// As FIPS 180-4 has it; the constants are calculated as it says, from the first primes.
pub fn sha256(data: &[u8]) -> String {
    let primes: Vec<u32> = (2u32..312).filter(|n| (2..*n).all(|d| n % d != 0)).collect();
    assert_eq!(primes.len(), 64);
    // The first 32 bits of the fraction of a root, by bisection in integers.
    let root_bits = |n: u32, power: u32| {
        let (mut low, mut high) = (0u128, 1u128 << 40);
        while high - low > 1 {
            let middle = (low + high) / 2;
            if middle.pow(power) <= (n as u128) << (32 * power) {
                low = middle;
            } else {
                high = middle;
            }
        }
        low as u32
    };
    let k: Vec<u32> = primes.iter().map(|p| root_bits(*p, 3)).collect();
    let mut h: Vec<u32> = primes[..8].iter().map(|p| root_bits(*p, 2)).collect();
    let mut bytes = data.to_vec();
    bytes.push(0x80);
    while bytes.len() % 64 != 56 {
        bytes.push(0);
    }
    bytes.extend((data.len() as u64 * 8).to_be_bytes());
    for block in bytes.chunks(64) {
        let mut w: Vec<u32> = block.chunks(4).map(|b| u32::from_be_bytes(b.try_into().unwrap())).collect();
        for i in 16..64 {
            let s0 = w[i - 15].rotate_right(7) ^ w[i - 15].rotate_right(18) ^ w[i - 15] >> 3;
            let s1 = w[i - 2].rotate_right(17) ^ w[i - 2].rotate_right(19) ^ w[i - 2] >> 10;
            w.push(w[i - 16].wrapping_add(s0).wrapping_add(w[i - 7]).wrapping_add(s1));
        }
        let mut v = h.clone();
        for i in 0..64 {
            let s1 = v[4].rotate_right(6) ^ v[4].rotate_right(11) ^ v[4].rotate_right(25);
            let choice = v[4] & v[5] ^ !v[4] & v[6];
            let t1 = [s1, choice, k[i], w[i]].iter().fold(v[7], |sum, x| sum.wrapping_add(*x));
            let s0 = v[0].rotate_right(2) ^ v[0].rotate_right(13) ^ v[0].rotate_right(22);
            let t2 = s0.wrapping_add(v[0] & v[1] ^ v[0] & v[2] ^ v[1] & v[2]);
            v.rotate_right(1);
            v[4] = v[4].wrapping_add(t1);
            v[0] = t1.wrapping_add(t2);
        }
        h.iter_mut().zip(v).for_each(|(sum, x)| *sum = sum.wrapping_add(x));
    }
    h.iter().map(|word| format!("{word:08x}")).collect()
}
