// SPDX-License-Identifier: MIT
// As much JSON as the conformance vectors have: objects, arrays, numbers, null and strings without escapes.
#pragma once

#include <cctype>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace json {

struct Value {
    std::map<std::string, Value> fields;
    std::vector<Value> items;
    std::string text;
    double number = -INFINITY;  // of null too: the vectors write minus infinity so

    const Value& operator[](const std::string& name) const { return fields.at(name); }
    bool has(const std::string& name) const { return fields.count(name) != 0; }
    int64_t integer(const std::string& name) const { return int64_t(fields.at(name).number); }
    template <class T>
    std::vector<T> numbers() const {
        std::vector<T> all;
        for (const Value& item : items) all.push_back(T(item.number));
        return all;
    }
};

class Reader {
public:
    explicit Reader(const std::string& text) : at_(text.c_str()) {}
    Value read() {
        Value value;
        skip();
        if (*at_ == '{') {
            each('}', [&] {
                const std::string name = string();
                expect(':');
                value.fields[name] = read();
            });
        } else if (*at_ == '[') {
            each(']', [&] { value.items.push_back(read()); });
        } else if (*at_ == '"') {
            value.text = string();
        } else if (*at_ == 'n') {
            at_ += 4;
        } else {
            char* end = nullptr;
            value.number = std::strtod(at_, &end);
            if (end == at_) throw std::runtime_error("no JSON value at " + std::string(at_).substr(0, 20));
            at_ = end;
        }
        return value;
    }

private:
    void skip() {
        while (std::isspace(static_cast<unsigned char>(*at_))) ++at_;
    }
    void expect(char c) {
        skip();
        if (*at_ != c) throw std::runtime_error(std::string("no ") + c + " at " + std::string(at_).substr(0, 20));
        ++at_;
    }
    std::string string() {
        expect('"');
        const char* begin = at_;
        while (*at_ && *at_ != '"') ++at_;
        std::string text(begin, at_);
        expect('"');
        return text;
    }
    template <class Member>
    void each(char end, Member member) {
        for (++at_, skip(); *at_ != end; skip()) {
            member();
            skip();
            if (*at_ != end) expect(',');
            skip();
        }
        ++at_;
    }

    const char* at_;
};

inline Value read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("cannot read " + path);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    return Reader(text).read();
}

}  // namespace json
